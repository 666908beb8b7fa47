"""`maxtext data prepare`: tokenizes the training documents into files, in parallel and
resumable.
"""

import shlex
import sys
import time
from typing import Any

from maxtext.cli import arguments
from maxtext.cli.data import load_config, take_number
from maxtext.cli.terminal import format_table
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.hardware import format_bytes

LINE_SECONDS = 10.0  # between two lines of progress without a terminal


def run(args: list[str]) -> int:
    from maxtext.input_pipeline.prepare import prepare, training_overrides
    from maxtext.tokenizers.text_utils import num_cores
    from maxtext.trainers.methods import method_of

    out = arguments.take_value(args, "--out")
    workers = take_number(args, "--workers", least=1) or num_cores()
    shard_documents = take_number(args, "--shard-documents", least=1)
    if out is None:
        raise ConfigError(
            "name an output folder: maxtext data prepare --out DIR [FILE] [key=value ...]"
        )
    folder = local_path(out)
    config = load_config(args)
    row_format = method_of(config).row_format(config)
    with ProgressReport(f"preparing {folder}") as report:
        result = prepare(config, row_format, folder, shard_documents, workers, report)
    counts = result.counts
    rows = [("documents", f"{counts.documents:,}"), ("records", f"{counts.records:,}")]
    rows += [("tokens", f"{counts.tokens:,}"), ("bad records", f"{counts.bad:,}")]
    rows += [("shards", f"{result.shards:,}"), ("size", format_bytes(counts.bytes))]
    if result.tokens:
        rows.append(("tokens/s", f"{result.tokens / max(result.seconds, 1e-9):,.0f}"))
        complete = result.tokens == counts.tokens
        done = "wrote" if complete else f"wrote the {result.tokens:,} missing tokens to"
    else:
        done = "nothing was missing in"
    print(f"{done} {folder}\n{format_table(rows, left=1)}", end="")
    print(f"train on it with\n{shlex.join(training_overrides(folder))}")
    return 0


class ProgressReport:
    """Reports progress: a bar on a terminal, otherwise a line every LINE_SECONDS."""

    def __init__(self, title: str):
        self.title = title
        self.bar: Any = None

    def __enter__(self) -> "ProgressReport":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(
                TextColumn("{task.description}"), *columns, console=Console(stderr=True)
            )
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def __call__(self, documents: int, total: int, tokens: int) -> None:
        """Report that `documents` of `total` are done. The first call gives the initial number."""
        now = time.monotonic()
        if not hasattr(self, "started"):
            self.started = self.reported = now
            self.initial = documents
            if self.bar:
                self.task = self.bar.add_task(
                    self.title, total=total, completed=documents, rates=""
                )
            return
        seconds = max(now - self.started, 1e-9)
        speed = (documents - self.initial) / seconds
        rates = f"{speed:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s"
        if self.bar:
            self.bar.update(self.task, completed=documents, rates=rates)
        elif now - self.reported > LINE_SECONDS:
            self.reported = now
            left = f"{(total - documents) / speed:,.0f} s left" if speed else "time left unknown"
            print(
                f"{self.title}: {documents:,} of {total:,} documents, {rates}, {left}",
                file=sys.stderr,
                flush=True,
            )
