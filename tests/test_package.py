"""The wheel is whole: what an installed copy needs is in it, and it trains without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.small_recipe import small

ROOT = Path(__file__).parent.parent
PACKAGES = ("afmoe", "callbacks", "conf")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(command: list[str], folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_WAIT_POLICY": "passive", "COLUMNS": "200", **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what belongs to the project: a build leaves folders where it ran."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    output = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output)], source)
    (path,) = output.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        others = {name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert names == wanted
    # what this is about, should the folders ever move
    for part in (
        "conf/sft.yaml",
        "conf/moe/compute/fp8.yaml",
        "callbacks/load_balance.py",
        "afmoe/data/assets/pydoc_topics.txt",
        "afmoe/data/assets/byte_tokenizer/tokenizer.json",
        "afmoe/data/assets/byte_tokenizer/chat_template.jinja",
        "afmoe/data/assets/NOTICE",
    ):
        assert part in names
    assert {"licenses/LICENSE", "licenses/afmoe/data/assets/NOTICE"} <= others


@pytest.fixture(scope="module")
def installed_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty venv that holds the wheel, with this one's site-packages behind it.

    The heavy dependencies are found there and not downloaded again. A line of a .pth file only adds to the
    path: the .pth files over there are not read, so that an editable install of the checkout stays behind.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    run([sys.executable, *install, "--ignore-installed", str(wheel)], folder)
    return python


def test_an_installed_wheel_trains_from_a_copy_of_the_recipe_alone(
    installed_python: Path, tmp_path: Path
) -> None:
    python = str(installed_python)
    shutil.copy(ROOT / "recipes" / "sft.py", tmp_path)
    show = f"import {', '.join(PACKAGES)}; print(*(m.__file__ for m in ({', '.join(PACKAGES)})), sep='\\n')"
    for path in run([python, "-c", show], tmp_path).splitlines():
        assert Path(path).is_relative_to(installed_python.parent.parent), path
    assert "moe/compute: bf16, " in run([python, "sft.py", "--help"], tmp_path)
    overrides = small(["model=afmoe_mini", "moe/compute=fp8", "run_name=main", "trainer.max_steps=300"])
    run([python, "sft.py", *overrides], tmp_path, HF_HUB_OFFLINE="1")
    main = tmp_path / "outputs" / "main"
    metrics = json.loads((main / "metrics.json").read_text())
    assert (metrics["status"], metrics["train/steps"]) == ("finished", 3)
    assert json.loads((main / "run.json").read_text())["versions"]["afmoe-recipe"] is not None
    assert (main / "export" / "chat_template.jinja").exists()
