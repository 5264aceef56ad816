"""What the libraries say on the console: each line once, and nothing that a person cannot act on."""

from __future__ import annotations

import logging
import os
import warnings

_NOISE = ("Tip: For seamless cloud", "GPU available:", "TPU available:", "HPU available:", "💡")


ONCE_A_MACHINE = "once_a_machine"
"""Extra of a record that all processes of a machine log alike: each into its file, one on the console."""


def quiet_libraries() -> None:
    """Send Lightning's log lines through the root logger only, without its known noise."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_news)
        # a run's log file is each process's own
        if not isinstance(handler, logging.FileHandler):
            handler.addFilter(_is_said_here)
    # Lightning 2.6.6 against torch 2.13; without effect here
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # the pack loader makes whole batches by itself; num_workers is data.num_workers
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
    # torchmetrics has summed what is logged over the ranks already
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True\)`")
    # the interval counts optimizer steps, which go on over the end of a short epoch
    warnings.filterwarnings("ignore", message=r"The number of training batches \(\d+\) is smaller than")
    # DeepSpeed 0.19.8 against torch 2.13
    warnings.filterwarnings("ignore", message=r"`torch.distributed.all_gather_into_tensor` is deprecated")
    # training without held-out rows is legal, and the first screen says how many there are
    warnings.filterwarnings("ignore", message=r"You defined a `validation_step` but have no `val_dataloader`")


def _is_news(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in _NOISE)


def _is_said_here(record: logging.LogRecord) -> bool:
    return not getattr(record, ONCE_A_MACHINE, False) or _number_on_this_machine() == 0


def _number_on_this_machine() -> int:
    """Of this process, from the variables of Lightning, torchrun or Slurm; 0 alone."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
