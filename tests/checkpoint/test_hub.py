"""Where `model.pretrained` points to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from afmoe.checkpoint.hub import resolve_pretrained
from afmoe.errors import ConfigError


def test_a_directory_is_itself(tmp_path):
    assert resolve_pretrained(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="revision=main is for hub names"):
        resolve_pretrained(str(tmp_path), "main")


@pytest.mark.parametrize(
    "name", ["./nothing", "/no/where", "outputs/run/export", "nothing", "~/no-such-model"]
)
def test_a_missing_directory_is_no_hub_name(name):
    with pytest.raises(ConfigError, match=f"model.pretrained={name}: no such directory"):
        resolve_pretrained(name)


def test_a_hub_name_comes_from_the_cache_when_offline_and_is_a_clear_error_else(tmp_path):
    commit = "0123456789012345678901234567890123456789"
    model = tmp_path / "models--someone--model"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    # a process of its own: the hub reads its settings once, at import
    code = """
import sys
from afmoe.checkpoint.hub import resolve_pretrained
from afmoe.errors import ConfigError
print(resolve_pretrained("someone/model"))
for arguments in (("someone/other",), ("someone/model", "v2"), ("some one/model",)):
    try:
        resolve_pretrained(*arguments)
    except ConfigError as error:
        print(error)
print("torch" in sys.modules)
"""
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )
    lines = child.stdout.splitlines()
    assert len(lines) == 5, child.stderr
    assert lines[0] == str(model / "snapshots" / commit)
    missing = "is no directory here and not in the hub's cache, and HF_HUB_OFFLINE is set"
    assert lines[1].startswith("model.pretrained=someone/other " + missing)
    assert lines[2].startswith("model.pretrained=someone/model at revision v2 " + missing)
    assert "some one/model" in lines[3]
    assert lines[4] == "False"
