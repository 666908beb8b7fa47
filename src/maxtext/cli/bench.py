"""`maxtext bench inference`: the speed of prefill and decode, by batch size and length.

Prefill: one prompt of each length. Generate: a batch of sequences of each length, decoded in
programs of several steps. Bandwidth counts what a decode step has to read once: all weights, and
the caches of the sequences. Medians of inference_microbenchmark_loop_iters runs, after one that
compiles.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.generation import load_session, note, resolve_named_model
from maxtext.cli.terminal import format_table
from maxtext.common import files
from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.inference import LLM
    from maxtext.inference.engine.engine import InferenceEngine

PROMPT_INDICES = itertools.count()


def run(arguments: Arguments) -> int:
    file, overrides = positionals.split(arguments.all_args, data=None)
    model = resolve_named_model("maxtext bench inference MODEL", file, overrides)
    config = model.config
    lengths = prompt_lengths(config)
    llm = load_session(model, text=False).llm
    rows = []
    for row in measure_all(llm, config, lengths):
        note(f"measured: {row['stage']} {row['batch']} x {row['length']}")
        rows.append(row)
    titles = list(dict.fromkeys(name for row in rows for name in row))
    table = [titles, *([str(row.get(name, "")) for name in titles] for row in rows)]
    sys.stdout.write(format_table(table, left=1))
    if config.inference_microbenchmark_log_file_path:
        record = {"model": model.path, "device": device_name(), "cases": rows}
        path = Path(config.inference_microbenchmark_log_file_path).expanduser()
        files.write_text(path, json.dumps(record, indent=1) + "\n")
    return 0


def prompt_lengths(config: MaxTextConfig) -> list[int]:
    text = config.inference_microbenchmark_prefill_lengths
    lengths = text.replace(" ", "").split(",")
    if not all(length.isdecimal() and int(length) for length in lengths):
        raise ConfigError(
            f"inference_microbenchmark_prefill_lengths={text!r} must be lengths of at least 1, "
            "separated by commas, such as 64,128"
        )
    return [int(length) for length in lengths]


def measure_all(llm: "LLM", config: MaxTextConfig, lengths: list[int]) -> Iterator[Json]:
    stages = config.inference_microbenchmark_stages.replace(" ", "").split(",")
    repeats = config.inference_microbenchmark_loop_iters
    if "prefill" in stages:
        for length in lengths:
            yield measure_prefill(llm, length, repeats)
    if "generate" in stages:
        largest = max(int(config.global_batch_size_to_load), 1)
        batches = {1 << power for power in range(largest.bit_length())} | {largest}
        for batch in sorted(batches):
            for length in lengths:
                yield measure_decode(llm, batch, length, repeats)
    if config.multi_sampling:
        for count in config.inference_microbenchmark_num_samples:
            yield measure_samples(llm, count, lengths[0], repeats)


def measure_prefill(llm: "LLM", length: int, repeats: int) -> Json:
    """The time to the first token of one prompt."""
    from maxtext.inference import GenerationRequest, SamplingParams

    engine = llm.engine_for(1, length + 1)
    params = SamplingParams(max_new_tokens=1)
    seconds = median_seconds(
        lambda: engine.generate([GenerationRequest(new_prompt(llm, length), params)]), repeats
    )
    return {
        "stage": "prefill",
        "batch": 1,
        "length": length,
        "ms": rounded(seconds * 1e3),
        "tokens/s": rounded(length / seconds),
    }


def measure_decode(llm: "LLM", batch: int, length: int, repeats: int) -> Json:
    """The time of a decode step with a batch of sequences."""
    import jax

    from maxtext.inference.engine.batches import MAX_DECODE_STEPS

    max_length = length + MAX_DECODE_STEPS * (repeats + 3)
    engine = llm.engine_for(batch, max_length)
    with engine.lease():
        prefill_batch(engine, llm, batch, length, max_length)
        sequences = engine.scheduler.running
        decode_batch, _ = engine.batches.decode(sequences, MAX_DECODE_STEPS, finished_slots=())

        def decode() -> None:
            jax.block_until_ready(engine.executor.decode(decode_batch))

        seconds = median_seconds(decode, repeats) / MAX_DECODE_STEPS
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.weights))
    executor, block_size = engine.executor, engine.batches.block_size
    cache_bytes = batch * (executor.slot_bytes + executor.block_bytes * length / block_size)
    return {
        "stage": "generate",
        "batch": batch,
        "length": length,
        "ms": rounded(seconds * 1e3),
        "tokens/s": rounded(batch / seconds),
        "GB/s": rounded((weight_bytes + cache_bytes) / seconds / 1e9),
    }


def prefill_batch(
    engine: "InferenceEngine", llm: "LLM", batch: int, length: int, max_length: int
) -> None:
    """Prefill a batch of sequences, with blocks for `max_length` tokens each."""
    from maxtext.inference import GenerationRequest, SamplingParams

    scheduler = engine.scheduler
    for index in range(batch):
        params = SamplingParams(max_new_tokens=max_length - length)
        request = GenerationRequest(new_prompt(llm, length), params)
        if (reason := engine.reject_reason(request)) is not None:
            raise ConfigError(str(reason))
        engine.add_request(index, request)
    scheduler.admit()
    while group := scheduler.next_prefill():
        engine.prefill(*group)
    fits = len(scheduler.running) == batch and all(
        scheduler.grow(sequence, max_length) for sequence in scheduler.running
    )
    if not fits:
        raise ConfigError(
            f"{batch} sequences of {max_length} tokens need more pages: raise pagedattn_num_pages"
        )
    for sequence in scheduler.running:  # attention reads as far as at the end of the measurement
        sequence.num_computed = max_length


def measure_samples(llm: "LLM", count: int, length: int, repeats: int) -> Json:
    """The time of several completions of one prompt, as long as one decode program."""
    from maxtext.inference import GenerationRequest, SamplingParams
    from maxtext.inference.engine.batches import MAX_DECODE_STEPS

    engine = llm.engine_for(count, length + MAX_DECODE_STEPS)

    def generate() -> None:
        prompt = new_prompt(llm, length)
        params = [
            SamplingParams(temperature=1.0, max_new_tokens=MAX_DECODE_STEPS, seed=seed)
            for seed in range(count)
        ]
        engine.generate([GenerationRequest(prompt, request) for request in params])

    seconds = median_seconds(generate, repeats)
    return {
        "stage": "samples",
        "batch": count,
        "length": length,
        "ms": rounded(seconds * 1e3),
        "tokens/s": rounded(count * MAX_DECODE_STEPS / seconds),
    }


def new_prompt(llm: "LLM", length: int) -> tuple[int, ...]:
    """A different prompt each time, so that no prefix is cached."""
    start = next(PROMPT_INDICES)
    return tuple((start + offset) % llm.config.vocab_size for offset in range(length))


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one that may compile."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def device_name() -> str:
    import jax

    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
