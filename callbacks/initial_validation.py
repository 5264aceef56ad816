"""Validation before the first step: what training starts from."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class InitialValidation(Callback):
    """Runs the validation loop once at step 0; a resumed run already has it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > 0:
            return
        # the same loop, on the wrapped model, that Lightning runs between training batches
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
