"""Output on the terminal that several commands share."""

import sys
from collections.abc import Sequence


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
