"""Recipes and scripts as modules, to call their functions in this process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_program(path: Path) -> ModuleType:
    """Run the file at `path` as a module named after it: `__main__` it is not."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
