"""`maxtext data throughput`: loads `steps` training batches as a run would, without a device, and
reports the speed.
"""

import itertools
import sys
import time
from typing import Any

import numpy as np

from maxtext.cli.arguments import Arguments
from maxtext.cli.batch_segments import sides
from maxtext.cli.data import load_config
from maxtext.cli.terminal import format_table
from maxtext.common import log, signals
from maxtext.configs.types import MaxTextConfig

LINE_SECONDS = 10.0  # between two lines of progress
PREFETCHED_BATCHES = 2  # as in a training run


def run(arguments: Arguments) -> int:
    from functools import partial

    from maxtext.input_pipeline import Split, open_data_streams, prefetch
    from maxtext.trainers.methods import method_of

    log.configure()
    config = load_config(arguments.all_words)
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
    config: MaxTextConfig, batches: Any, start: float
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
