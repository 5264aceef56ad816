"""From the typed config to the objects of a run, in the order in which `recipes/sft.py` makes them.

| file | makes |
|---|---|
| `source.py` | what the model is: its config, its tokenizer, where its weights are |
| `checks.py` | nothing: refuses what the rest could not do, before it does anything slow |
| `data.py` | the batches |
| `callbacks.py` | what happens beside the steps |
| `trainer.py` | Lightning's trainer |
| `model.py` | the model with its weights, and the module that trains it |
"""

from afmoe.assembly.callbacks import make_callbacks
from afmoe.assembly.checks import (
    check_choices,
    check_model,
    check_parallelism,
    check_validation,
    training_memory_gib,
)
from afmoe.assembly.data import make_data
from afmoe.assembly.model import make_model, make_module
from afmoe.assembly.source import ModelSource, find_model, meta_model
from afmoe.assembly.trainer import make_trainer

__all__ = [
    "ModelSource",
    "check_choices",
    "check_model",
    "check_parallelism",
    "check_validation",
    "find_model",
    "make_callbacks",
    "make_data",
    "make_model",
    "make_module",
    "make_trainer",
    "meta_model",
    "training_memory_gib",
]
