"""One launch of two processes for all quick tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.cases import ALONE, QUICK, half, resumed, saved
from tests.parallel.comparison import OneProcess, train
from tests.parallel.worker import run


@pytest.fixture(scope="session")
def one() -> OneProcess:
    return OneProcess()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what the quick cases came to."""
    folder = tmp_path_factory.mktemp("two-ranks")
    run(half(ALONE, folder))
    quick = [saved(case, folder) for case in QUICK]
    train(quick + resumed(folder), folder, world_size=2, timeout_seconds=150)
    return folder
