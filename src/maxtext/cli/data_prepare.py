"""`maxtext data prepare`: the training documents of a configuration as files of tokens, by all
cores, resumable.
"""

import shlex
import sys
import time
from typing import Any

from maxtext.cli import arguments
from maxtext.cli.data import settled, take_number
from maxtext.cli.models import aligned
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.hardware import format_bytes

LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal


def run(args: list[str]) -> int:
    from maxtext.input_pipeline.prepare import prepare, training_overrides
    from maxtext.tokenizers.text_utils import num_cores

    out = arguments.take_value(args, "--out")
    workers = take_number(args, "--workers", least=1) or num_cores()
    shard_documents = take_number(args, "--shard-documents", least=1)
    if out is None:
        raise ConfigError(
            "say where to write: maxtext data prepare --out DIR [FILE] [key=value ...]"
        )
    place = local_path(out)
    config = settled(args)
    with Report(f"preparing {place}") as report:
        made = prepare(config, place, shard_documents, workers, report)
    counts = made.counts
    rows = [("documents", f"{counts.documents:,}"), ("records", f"{counts.records:,}")]
    rows += [("tokens", f"{counts.tokens:,}"), ("bad records", f"{counts.bad:,}")]
    rows += [("shards", f"{made.shards:,}"), ("size", format_bytes(counts.bytes))]
    if made.tokens:
        rows.append(("tokens/s", f"{made.tokens / max(made.seconds, 1e-9):,.0f}"))
        done = (
            "wrote"
            if made.tokens == counts.tokens
            else f"wrote the {made.tokens:,} tokens that were missing in"
        )
    else:
        done = "there was nothing left to write in"
    print(
        f"{done} {place}\n{aligned(rows, left=1)}train on it with\n{shlex.join(training_overrides(place))}"
    )
    return 0


class Report:
    """Progress: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, title: str):
        self.title = title
        self.bar: Any = None

    def __enter__(self) -> "Report":
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

    def __call__(self, documents: int, of: int, tokens: int) -> None:
        """`documents` of so many are done; the first call says how many were when the run began."""
        now = time.monotonic()
        if not hasattr(self, "began"):
            self.began, self.before, self.said = now, documents, now
            if self.bar:
                self.task = self.bar.add_task(self.title, total=of, completed=documents, rates="")
            return
        seconds = max(now - self.began, 1e-9)
        speed = (documents - self.before) / seconds
        rates = f"{speed:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s"
        if self.bar:
            self.bar.update(self.task, completed=documents, rates=rates)
        elif now - self.said > LINE_SECONDS:
            self.said = now
            left = f"{(of - documents) / speed:,.0f} s left" if speed else "time left unknown"
            print(
                f"{self.title}: {documents:,} of {of:,} documents, {rates}, {left}",
                file=sys.stderr,
                flush=True,
            )
