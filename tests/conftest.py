"""Every test starts from the same seed, on two threads, without the network."""

from __future__ import annotations

import os
import random

# before any library reads them
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "2")
# waiting threads that spin take the cores from whatever else runs: 292 s became 38 s at load 6
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> int:
    torch.set_num_threads(2)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0
