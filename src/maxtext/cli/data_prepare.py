"""`maxtext data prepare`: tokenizes the training documents into files, in parallel and
resumable. `maxtext data index`: an index of files that are tokenized already.
"""

import shlex
import sys
import time
from typing import Any

from maxtext.cli.arguments import Arguments
from maxtext.cli.data import load_config
from maxtext.cli.terminal import format_table
from maxtext.common import log
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.hardware import format_bytes

LINE_SECONDS = 10.0  # between two lines of progress without a terminal


def run(arguments: Arguments) -> int:
    from maxtext.input_pipeline.prepare import prepare, training_overrides
    from maxtext.tokenizers.text_utils import num_cores
    from maxtext.trainers.methods import method_of

    log.configure()
    if arguments.task == "index":
        return write_olmo_index(arguments)
    folder, shard_documents = arguments["--out"], arguments["--shard-documents"]
    workers = arguments["--workers"] or num_cores()
    config = load_config(arguments.all_words)
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


def write_olmo_index(arguments: Arguments) -> int:
    """`maxtext data index`: the index of tokenized .npy files for dataset_type=olmo_grain."""
    from maxtext.input_pipeline.formats import find_files
    from maxtext.input_pipeline.olmo_index import write_index

    out, length = arguments["--out"], arguments["--length"]
    if not arguments.words:
        raise ConfigError(f"name the files: {arguments.usage}")
    if local_path(out).exists():
        raise ConfigError(f"{out} exists already: remove it first, or choose another --out")
    files = find_files("FILES", ",".join(arguments.words))
    index = write_index(out, files, length, arguments["--dtype"])
    print(
        f"wrote {out}: {len(index.shards):,} files, {index.tokens:,} tokens, {index.instances:,} "
        f"rows of {length:,}"
    )
    print(
        f"train on it with\ndataset_type=olmo_grain olmo_index_path={out} "
        f"max_target_length={length}"
    )
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
