"""Progress of work on checkpoints, one bar a stage, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn

OnProgress = Callable[[str, int, int], None]
"""What is being done, how much is done, how much there is."""


def no_progress(stage: str, done: int, total: int) -> None:
    """For a caller that shows nothing."""


@contextmanager
def progress_bars(amount: ProgressColumn) -> Iterator[OnProgress]:
    """Bars that appear with the first report, so that an early mistake stays the one line it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def on_progress(stage: str, done: int, total: int) -> None:
        progress.start()
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
        progress.update(tasks[stage], completed=done)

    try:
        yield on_progress
    finally:
        if tasks:
            progress.stop()
