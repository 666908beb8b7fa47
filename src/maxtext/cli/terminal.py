"""Output on the terminal that several commands share."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxtext.common.log import print_status

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LOG_SECONDS = 10.0  # between two lines of progress where there is no terminal


def format_table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Rows as text with aligned columns: the first `left` columns to the left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        sides = ["<"] * left + [">"] * (len(cells) - left)
        padded = [
            f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines) + "\n"


class ProgressBar:
    """A progress bar of bytes, shown only on a terminal."""

    def __init__(self, title: str):
        self.title = title

    def __enter__(self):
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        task = self.bar.add_task(self.title, total=None)
        return lambda done, total, name: self.bar.update(
            task, completed=done, total=total, description=name[-48:]
        )

    def __exit__(self, *error) -> None:
        if hasattr(self, "bar"):
            self.bar.stop()


class CountBar:
    """Progress of a number of things: `bar(done, total, description)`. A bar on a terminal,
    elsewhere a line now and then.
    """

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.description = ""
        self.logged_at = time.monotonic()

    def __enter__(self) -> "CountBar":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def start(self) -> "Progress":
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True))
        bar.start()
        return bar

    def __call__(self, done: int, total: int, description: str) -> None:
        if sys.stderr.isatty():
            bar = self.bar = self.bar or self.start()
            if self.task is None or description != self.description:
                self.task = bar.add_task(description, total=total)
            bar.update(self.task, completed=done, total=total)
        elif time.monotonic() - self.logged_at >= LOG_SECONDS:
            self.logged_at = time.monotonic()
            print_status(f"{description}: {done:,} of {total:,}")
        self.description = description
