"""`maxtext data throughput`: `steps` training batches as a run would load them, without a device,
and how fast.
"""

import itertools
import sys
import time
from typing import Any

import numpy as np

from maxtext.cli.data import settled
from maxtext.cli.models import aligned
from maxtext.common import signals
from maxtext.configs.types import MaxTextConfig

LINE_SECONDS = 10.0  # between two signs of life
AHEAD = 2  # batches that wait for the device in a run


def run(args: list[str]) -> int:
    from functools import partial

    from maxtext.input_pipeline import Split, open_data_streams, prefetch
    from maxtext.trainers.batch_size import batch_size_at, batch_sizes

    config = settled(args)
    start = time.perf_counter()
    streams = open_data_streams(
        config, Split.TRAIN, partial(batch_size_at, config), batch_sizes(config)
    )
    assert streams is not None, "a source has training data, or says what is missing"
    batches = prefetch(streams, AHEAD)
    try:
        times, tokens, places, code = take(config, batches, start)
    finally:
        batches.close()
    print(aligned(table(config, times, tokens, places), left=1), end="")
    return code


def take(
    config: MaxTextConfig, batches: Any, start: float
) -> tuple[list[float], list[int], int, int]:
    """When each batch was there, its tokens, and the places of all; the exit code of a signal that
    ended it early.
    """
    times, tokens, places, said, code = [start], [], 0, start, 0
    try:
        for batch in itertools.islice(batches, config.steps):
            used = batch["targets_segmentation"] != 0
            tokens.append(int(used.sum()))
            times.append(time.perf_counter())
            places += used.size
            if times[-1] - said > LINE_SECONDS:
                said = times[-1]
                print(f"{len(tokens):,} of {config.steps:,} batches", file=sys.stderr, flush=True)
    except KeyboardInterrupt as error:
        signals.consume()
        code = signals.exit_code_of(error)
    return times[: len(tokens) + 1], tokens, places, code


def table(
    config: MaxTextConfig, times: list[float], tokens: list[int], places: int
) -> list[tuple[str, str]]:
    """The first batch apart: it waits for files to be opened and workers to start."""
    waits = np.diff(times)
    if not len(waits):
        return [("batches", "0")]
    rows = [("batches", f"{len(tokens):,}"), ("tokens", f"{sum(tokens):,} of {places:,} places")]
    if len(tokens) < config.steps:
        rows[0] = ("batches", f"{len(tokens):,} of {config.steps:,} steps")
    rows.append(("first batch", f"{waits[0]:.3f} s"))
    if len(tokens) > 1:
        seconds, each = max(waits[1:].sum(), 1e-9), places / len(tokens)
        rows += [
            ("batches/s", f"{len(waits[1:]) / seconds:,.2f}"),
            ("tokens/s", f"{sum(tokens[1:]) / seconds:,.0f}"),
            ("tokens/s with padding", f"{each * len(waits[1:]) / seconds:,.0f}"),
            ("ms a batch, median", f"{np.median(waits[1:]) * 1e3:.2f}"),
            ("ms a batch, 99%", f"{np.percentile(waits[1:], 99) * 1e3:.2f}"),
        ]
    return rows
