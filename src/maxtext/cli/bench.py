"""`maxtext bench inference`: how fast prompts are read and tokens written, by batch and length.

Prefill: one prompt of each length, whole. Generate: a batch of sequences of each length that are
all at work, blocks of tokens in one loop on the device. Bandwidth counts what one step has to read
once: all weights, and what is kept of the sequences' tokens. Medians of
inference_microbenchmark_loop_iters runs, after one that compiles.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxtext.cli import arguments
from maxtext.cli.answering import note, open_model, settle
from maxtext.cli.decode import model_place
from maxtext.cli.models import aligned
from maxtext.common import files
from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig


def run(args: list[str]) -> int:
    if not args or args[0] != "inference":
        raise ConfigError("what is to be measured? maxtext bench inference [FILE] [key=value ...]")
    path, overrides = arguments.split(args[1:])
    place = model_place(path, overrides)
    config = settle(place, path, overrides)
    lengths = prompt_lengths(config)
    model = open_model(place, config, text=False).llm
    rows = []
    for row in cases(model, config, lengths):
        note(f"measured: {row['stage']} {row['batch']} x {row['length']}")
        rows.append(row)
    titles = list(dict.fromkeys(name for row in rows for name in row))
    table = [titles, *([str(row.get(name, "")) for name in titles] for row in rows)]
    sys.stdout.write(aligned(table, left=1))
    if config.inference_microbenchmark_log_file_path:
        text = json.dumps({"model": place, "device": device(), "cases": rows}, indent=1)
        files.write_text(
            Path(config.inference_microbenchmark_log_file_path).expanduser(), text + "\n"
        )
    return 0


def prompt_lengths(config: MaxTextConfig) -> list[int]:
    args = config.inference_microbenchmark_prefill_lengths.replace(" ", "").split(",")
    if not all(arg.isdecimal() and int(arg) for arg in args):
        raise ConfigError(
            f"inference_microbenchmark_prefill_lengths={config.inference_microbenchmark_prefill_lengths!r} must be "
            "lengths of at least 1, separated by commas, such as 64,128"
        )
    return [int(arg) for arg in args]


def cases(model: Any, config: MaxTextConfig, lengths: list[int]) -> Iterator[dict[str, Any]]:
    stages = config.inference_microbenchmark_stages.replace(" ", "").split(",")
    times = config.inference_microbenchmark_loop_iters
    if "prefill" in stages:
        for length in lengths:
            yield prefill(model, length, times)
    if "generate" in stages:
        most = max(int(config.global_batch_size_to_load), 1)
        batches = sorted(
            {1 << power for power in range(most.bit_length()) if 1 << power <= most} | {most}
        )
        for batch in batches:
            for length in lengths:
                yield generate(model, batch, length, times)
    if config.multi_sampling:
        for count in config.inference_microbenchmark_num_samples:
            yield samples(model, count, lengths[0], times)


def prefill(model: Any, length: int, times: int) -> dict[str, Any]:
    """One prompt, until its first token is there."""
    from maxtext.inference.scheduler import Request
    from maxtext.inference.serving import make_scheduler

    scheduler = make_scheduler(model.programs, model.weights, 1, length + 1)
    seconds = timed(lambda: scheduler.run([Request(prompt(model, length), 1)]), times)
    return {
        "stage": "prefill", "batch": 1, "length": length, "ms": shown(seconds * 1e3),
        "tokens/s": shown(length / seconds),
    }  # fmt: skip


def generate(model: Any, batch: int, length: int, times: int) -> dict[str, Any]:
    """A block of tokens of every sequence at a time."""
    import jax
    import numpy as np

    from maxtext.inference.engine import BLOCK
    from maxtext.inference.sampling import Kind
    from maxtext.inference.scheduler import Request
    from maxtext.inference.serving import make_scheduler

    longest = length + BLOCK * (times + 3)
    scheduler = make_scheduler(model.programs, model.weights, batch, longest)
    engine = scheduler.engine
    for number in range(batch):
        request = Request(prompt(model, length), longest - length)
        refusal = scheduler.refusal(request)
        if refusal is not None:
            raise ConfigError(refusal)
        scheduler.add(number, request)
    scheduler.admit()
    while group := scheduler.next_group():
        scheduler.put(*group)
    if len(scheduler.running) < batch or not all(
        scheduler.grown(work, longest) for work in scheduler.running
    ):
        raise ConfigError(
            f"{batch} sequences of {longest} tokens need more pages: raise pagedattn_num_pages"
        )
    slots = engine.size.slots  # which may be more
    table = scheduler.table(scheduler.running, slots, [work.slot for work in scheduler.running])
    still = np.zeros(slots, bool)
    how: dict[str, Any] = {
        "reach": scheduler.decode_reach([longest]),
        "kind": Kind.GREEDY,
        "scored": False,
    }

    def block() -> None:
        jax.block_until_ready(engine.decode(table, still, BLOCK, **how).tokens)

    seconds = timed(block, times) / BLOCK
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))
    kept = batch * (engine.slot_bytes + engine.page_bytes * length / scheduler.page)
    moved = (weights + kept) / seconds
    return {
        "stage": "generate", "batch": batch, "length": length, "ms": shown(seconds * 1e3),
        "tokens/s": shown(batch / seconds), "GB/s": shown(moved / 1e9),
    }  # fmt: skip


def samples(model: Any, count: int, length: int, times: int) -> dict[str, Any]:
    """Several completions of one prompt, a block of tokens each."""
    from maxtext.inference.engine import BLOCK
    from maxtext.inference.sampling import Sampling
    from maxtext.inference.scheduler import Request
    from maxtext.inference.serving import make_scheduler

    scheduler = make_scheduler(model.programs, model.weights, count, length + BLOCK)

    def several() -> None:
        ids = prompt(model, length)
        scheduler.run([Request(ids, BLOCK, Sampling(1.0), seed) for seed in range(count)])

    seconds = timed(several, times)
    return {
        "stage": "samples", "batch": count, "length": length, "ms": shown(seconds * 1e3),
        "tokens/s": shown(count * BLOCK / seconds),
    }  # fmt: skip


STARTS = itertools.count()


def prompt(model: Any, length: int) -> tuple[int, ...]:
    """Another one each time, so that nothing is known of it."""
    start = next(STARTS)
    return tuple((start + place) % model.config.vocab_size for place in range(length))


def timed(function: Any, times: int) -> float:
    """Median seconds of a call, after one that may compile."""
    function()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def shown(value: float) -> float:
    return float(f"{value:.4g}")


def device() -> str:
    import jax

    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
