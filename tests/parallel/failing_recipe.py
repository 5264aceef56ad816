"""The recipe, with a fault: the last rank raises, or is killed, at step 3.

FAULT=raise|die-in-save failing_recipe.py OVERRIDES...
"""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[2] / "recipes" / "sft.py"


def break_load_balance() -> None:
    from callbacks.load_balance import LoadBalance

    whole = LoadBalance.on_train_batch_end

    def faulty(self: Any, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == trainer.world_size - 1:
            raise ValueError("the last rank broke in step 3")
        whole(self, trainer, *args)

    LoadBalance.on_train_batch_end = faulty


def break_save() -> None:
    from afmoe.parallel.whole_state import WholeState

    whole = WholeState.optimizer

    def faulty(self: Any, groups: Any) -> Any:
        # the second of two checkpoints, after the weights were brought together
        if self.owner.trainer.global_step == 4 and not self.keeps:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, groups)

    WholeState.optimizer = faulty


def main() -> None:
    spec = importlib.util.spec_from_file_location("sft", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    {"raise": break_load_balance, "die-in-save": break_save}[os.environ["FAULT"]]()
    recipe.main()


if __name__ == "__main__":
    main()
