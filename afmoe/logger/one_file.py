"""Lightning's TensorBoard logger, with one event file a start of a run."""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import TensorBoardLogger


class OneFileLogger(TensorBoardLogger):
    """Stays open between training and what follows it, the last validation.

    Lightning closes its own at the end of `fit`, and the next figure opens a second file. Readers take files
    in the order of their names, which end in the second and a number that counts the process's files: in a
    process that had many, `.10` came before `.9`, and the last validation before the first.
    """

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is not None:
            self._experiment.flush()
        if status == "success":
            self.save()

    def close(self) -> None:
        super().finalize("success")
