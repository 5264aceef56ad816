from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(seed: int) -> None:
    """The tensors here are small: a second thread costs more than it gives."""
    torch.set_num_threads(1)
