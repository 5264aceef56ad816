"""Imports point one way (docs/architecture.md), start-up stays light, files stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Each layer may import itself and what stands above it.
LAYERS = [
    [
        "afmoe",
        "afmoe.console",
        "afmoe.errors",
        "afmoe.config",
        "afmoe.registry",
        "afmoe.plugins",
        "afmoe.hardware",
        "afmoe.conf_tree",
        "afmoe.flops",
        "afmoe.model_shape",
        "afmoe.planning",
    ],
    [
        "afmoe.checkpoint.atomic",
        "afmoe.checkpoint.directory",
        "afmoe.compose",
        "afmoe.endings",
        "afmoe.explain",
        "afmoe.finished",
        "afmoe.resume",
        "afmoe.run_log",
        "afmoe.sweep_job",
        "afmoe.run",
        "afmoe.signals",
        "afmoe.run_difference",
        "afmoe.step_records",
    ],
    ["afmoe.data"],
    [
        "afmoe.device_speed",
        "afmoe.layers",
        "afmoe.moe.activations",
        "afmoe.moe.cpu_kernels",
        "afmoe.moe.quantization",
        "afmoe.moe.grouped_mm",
        "afmoe.recomputation",
    ],
    ["afmoe.attention", "afmoe.moe.compute", "afmoe.moe.dispatch"],
    ["afmoe.moe"],
    ["afmoe.losses", "afmoe.chunked_cross_entropy", "afmoe.language_head"],
    [
        "afmoe.decoder_layer",
        "afmoe.generation",
        "afmoe.initialization",
        "afmoe.layer_compilation",
        "afmoe.model_plugins",
        "afmoe.model",
        "afmoe.outputs",
    ],
    [
        "afmoe.checkpoint",
        "afmoe.logger",
        "afmoe.memory",
        "afmoe.optim",
        "afmoe.parallel",
        "afmoe.planning.shape_of_run",
    ],
    ["afmoe.faults"],
    ["afmoe.module"],
    ["afmoe.fault_record"],
    ["callbacks"],
    ["afmoe.assembly", "afmoe.finish", "afmoe.replay", "afmoe.screens"],
    ["recipes", "scripts"],
]
# `from_pretrained` and `save_pretrained` are methods of the model that people look for there; the work is
# done in `afmoe.checkpoint`, imported inside the methods. The registry imports a plugin when it is asked for.
INSIDE_FUNCTIONS = {"afmoe.model": "afmoe.checkpoint", "afmoe.registry": "afmoe.plugins"}


def layer_of(module: str) -> int:
    """The layer of a module: that of its longest listed prefix."""
    best, layer = "", -1
    for number, names in enumerate(LAYERS):
        for name in names:
            if (module == name or module.startswith(name + ".")) and len(name) > len(best):
                best, layer = name, number
    assert layer >= 0, f"{module} belongs to no layer"
    return layer


def our_files() -> list[Path]:
    return [
        path
        for folder in ("afmoe", "callbacks", "recipes", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    ]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    modules = {module_name(file) for file in our_files()}
    names: set[str] = set()
    type_checking: set[ast.AST] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            type_checking.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in type_checking:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` imports the module
            names |= inner if inner <= modules else {node.module, *inner}
    return {name for name in names if name in modules}


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in our_files()
        for name in imported(path)
        if name != "afmoe"
        and layer_of(name) > layer_of(module_name(path))
        and not name.startswith(INSIDE_FUNCTIONS.get(module_name(path), "-"))
    ]
    assert not wrong, wrong


def test_plugins_import_neither_each_other_nor_the_model() -> None:
    from afmoe.plugins import PLUGINS

    plugins = {module for names in PLUGINS.values() for module in names.values()}
    for module in plugins - set(PLUGINS["callbacks"].values()):
        used = imported(ROOT / (module.replace(".", "/") + ".py"))
        assert not used & (plugins - {module} | {"afmoe.model"}), module


def test_data_imports_only_config_registry_and_errors() -> None:
    for path in (ROOT / "afmoe" / "data").rglob("*.py"):
        for name in imported(path):
            assert name.startswith("afmoe.data") or name in (
                "afmoe.config",
                "afmoe.registry",
                "afmoe.errors",
            ), path


def test_deepspeed_is_imported_only_in_parallel() -> None:
    for path in our_files():
        if "parallel" not in path.parts:
            assert "import deepspeed" not in path.read_text(encoding="utf-8"), path


def test_help_loads_no_torch() -> None:
    code = """
import runpy, sys
sys.argv = ["sft.py", "--help"]
try:
    runpy.run_path("recipes/sft.py", run_name="__main__")
except SystemExit:
    pass
assert "torch" not in sys.modules and "lightning" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "moe/compute: bf16, deepgemm_fp8, fp8, mxfp8, native, reference" in done.stdout


def test_no_file_is_over_400_lines() -> None:
    long = [str(path) for path in our_files() if len(path.read_text(encoding="utf-8").splitlines()) > 400]
    assert not long, long
