"""`maxtext data`: tokenizes training documents into files, indexes tokenized ones, and measures the
input pipeline, all without a device. data_inspect.py shows batches.
"""

import itertools
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.batch_files import sides
from maxtext.cli.terminal import format_table
from maxtext.common import log, signals
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.hardware import format_bytes
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from rich.progress import Progress

    from maxtext.input_pipeline import BatchIterator

BATCH = "per_device_batch_size"
MAX_DEVICES_PER_SEQUENCE = 4096
PREFETCHED_BATCHES = 2  # as in a training run
LINE_SECONDS = 10.0  # between two lines of progress without a terminal


def run(arguments: Arguments) -> int:
    tasks = {
        "prepare": prepare_data,
        "index": write_olmo_index,
        "throughput": measure_throughput,
    }
    log.configure()
    return tasks[arguments.task](arguments)


def load_config(args: list[str]) -> MaxTextConfig:
    """The configuration of FILE and overrides for the fewest devices that it allows.

    Does not start a device.
    """
    from maxtext.cli.train import open_model_checkpoint
    from maxtext.configs import sources
    from maxtext.configs.derive import Devices
    from maxtext.configs.load import resolve
    from maxtext.models.configuration import load

    path, overrides = positionals.split(args)
    layer = sources.from_overrides(overrides)
    checkpoint = open_model_checkpoint(path, layer)
    model = checkpoint.model_layer if checkpoint else None
    settings, _ = resolve(path, layer, os.environ, model)
    count, slices = fewest_devices({key: setting.value for key, setting in settings.items()})
    return load(path, layer, devices=Devices(count, slices), model=model)


def fewest_devices(values: Mapping[str, Any]) -> tuple[int, int]:
    """The (devices, slices) that the mesh sizes and a fractional batch size need. `load` checks
    whether they fit.
    """

    def size(key: str) -> float:
        try:
            value = float(values[key])
        except (TypeError, ValueError):
            return 1
        return value if value > 0 and math.isfinite(value) else 1

    sizes = {key: int(size(key)) for key in values if key.endswith("_parallelism")}
    dcn = math.prod(size for key, size in sizes.items() if key.startswith("dcn_"))
    slices = max(dcn, int(size("num_slices")))
    count = slices * math.prod(size for key, size in sizes.items() if key.startswith("ici_"))
    batch = Fraction(size(BATCH)).limit_denominator(MAX_DEVICES_PER_SEQUENCE)
    return math.lcm(count, batch.denominator), slices


def prepare_data(arguments: Arguments) -> int:
    from maxtext.input_pipeline.prepare import prepare, training_overrides
    from maxtext.tokenizers.text_utils import num_cores
    from maxtext.trainers.methods import method_of

    folder, shard_documents = arguments["--out"], arguments["--shard-documents"]
    workers = arguments["--workers"] or num_cores()
    config = load_config(arguments.all_args)
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
    if not arguments.args:
        raise ConfigError(f"name the files: {arguments.usage}")
    if local_path(out).exists():
        raise ConfigError(f"{out} exists already: remove it first, or choose another --out")
    files = find_files("FILES", ",".join(arguments.args))
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
        self.bar: Progress | None = None

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


def measure_throughput(arguments: Arguments) -> int:
    from functools import partial

    from maxtext.input_pipeline import Split, open_data_streams, prefetch
    from maxtext.trainers.methods import method_of

    config = load_config(arguments.all_args)
    start = time.perf_counter()
    method = method_of(config)
    streams = open_data_streams(
        config,
        Split.TRAIN,
        method.row_format(config),
        rows=partial(method.batches.rows_to_read, config),
        sizes=method.batches.sizes_to_read(config),
    )
    assert streams is not None, "a source has training data, or says what is missing"
    batches = prefetch(streams, PREFETCHED_BATCHES)
    try:
        times, tokens, positions, code = read_batches(config, batches, start)
    finally:
        batches.close()
    print(format_table(table(config, times, tokens, positions), left=1), end="")
    return code


def read_batches(
    config: MaxTextConfig, batches: "BatchIterator", start: float
) -> tuple[list[float], list[int], int, int]:
    """(arrival times, tokens of each batch, positions of all, exit code of a signal that ended it
    early).
    """
    times, tokens, positions, reported, code = [start], [], 0, start, 0
    try:
        for batch in itertools.islice(batches, config.steps):
            segment_ids = [fields["inputs_segmentation"] for fields in sides(batch).values()]
            tokens.append(sum(int(np.count_nonzero(ids)) for ids in segment_ids))
            times.append(time.perf_counter())
            positions += sum(ids.size for ids in segment_ids)
            if times[-1] - reported > LINE_SECONDS:
                reported = times[-1]
                print(f"{len(tokens):,} of {config.steps:,} batches", file=sys.stderr, flush=True)
    except KeyboardInterrupt as error:
        signals.consume()
        code = signals.exit_code_of(error)
    return times[: len(tokens) + 1], tokens, positions, code


def table(
    config: MaxTextConfig, times: list[float], tokens: list[int], positions: int
) -> list[tuple[str, str]]:
    """Results by name. The first batch is separate: it waits for files to be opened and workers."""
    waits = np.diff(times)
    if not len(waits):
        return [("batches", "0")]
    rows = [
        ("batches", f"{len(tokens):,}"),
        ("tokens", f"{sum(tokens):,} of {positions:,} positions"),
    ]
    if len(tokens) < config.steps:
        rows[0] = ("batches", f"{len(tokens):,} of {config.steps:,} steps")
    rows.append(("first batch", f"{waits[0]:.3f} s"))
    if len(tokens) > 1:
        seconds, batch_positions = max(waits[1:].sum(), 1e-9), positions / len(tokens)
        rows += [
            ("batches/s", f"{len(waits[1:]) / seconds:,.2f}"),
            ("tokens/s", f"{sum(tokens[1:]) / seconds:,.0f}"),
            ("tokens/s with padding", f"{batch_positions * len(waits[1:]) / seconds:,.0f}"),
            ("ms per batch, median", f"{np.median(waits[1:]) * 1e3:.2f}"),
            ("ms per batch, 99%", f"{np.percentile(waits[1:], 99) * 1e3:.2f}"),
        ]
    return rows
