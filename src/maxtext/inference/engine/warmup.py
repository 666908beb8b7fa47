"""Compiles, before real requests arrive, the programs for them: by requests for all shapes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from maxtext.common import progress
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine import shapes
from maxtext.inference.engine.batches import MAX_DECODE_STEPS
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.layout import EngineLayout
from maxtext.inference.engine.program_cache import num_cache_hits
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams

Run = Callable[[list[GenerationRequest], bool], None]


def warm_up(engine: InferenceEngine, params: SamplingParams, run: Run) -> None:
    """Compile the programs for requests that are sampled like `params`. `run` runs requests through
    the engine, with `expects_requests` as its second argument. The log and `progress.status` say
    how far it is."""
    config, programs = engine.programs.config, engine.programs
    chunk_size, compilation = engine.scheduler.max_chunk, programs.compilation
    start, num_before, num_hits = time.monotonic(), compilation.num_compiled, num_cache_hits()
    steps = len(prompt_shapes(config, engine.executor))
    is_logged, compilation.is_logged = compilation.is_logged, True
    try:
        for step, requests in enumerate(warmup_requests(config, params, engine.executor), 1):
            compilation.warmup_step = f"warm-up {step} of {steps}"
            progress.report(compilation.warmup_step)
            for _ in engine.drafts.each_mode():
                run(requests, False)
            is_long = chunk_size is not None and len(requests[0].prompt) > chunk_size.tokens
            if chunk_size is not None and chunk_size.only_online and is_long:
                run(requests, True)
    finally:
        compilation.is_logged, compilation.warmup_step = is_logged, ""
        progress.report("")
    LOGGER.info(
        "warm-up: %d programs in %.1f s, with %d compilations from jax_cache_dir",
        compilation.num_compiled - num_before,
        time.monotonic() - start,
        num_cache_hits() - num_hits,
    )


def warmup_requests(
    config: MaxTextConfig, params: SamplingParams, layout: EngineLayout
) -> Iterator[list[GenerationRequest]]:
    """Lists of requests for prompts up to max_prefill_predict_length, or of any length where they
    share rows, sequences up to max_target_length, and tokens that are sampled as with `params`.
    """
    length, vocab_size = config.max_target_length, config.vocab_size
    params = replace(params, ignore_eos=True, logprobs=0 if config.return_log_prob else None)
    # Where decode programs have a fixed number of steps, a completion ends with another one.
    new_tokens = MAX_DECODE_STEPS + 2 if layout.few_programs else 2
    prompt_index = 0
    for size, count in prompt_shapes(config, layout):
        params = replace(params, max_new_tokens=min(new_tokens, length - size))
        requests = []
        for _ in range(count):
            prompt_index += 1  # a new first token, so that no prefix is cached
            prompt = [prompt_index // vocab_size % vocab_size] * size
            prompt[0] = prompt_index % vocab_size
            requests.append(GenerationRequest(prompt, params))
        yield requests


def prompt_shapes(config: MaxTextConfig, layout: EngineLayout) -> list[tuple[int, int]]:
    """The lengths of prompts and their numbers, for each program."""
    return list(dict.fromkeys(iterate_shapes(config, layout)))


def iterate_shapes(config: MaxTextConfig, layout: EngineLayout) -> Iterator[tuple[int, int]]:
    slots, length = config.global_batch_size_to_load, config.max_target_length
    longest = min(config.max_prefill_predict_length, length - 2)
    counts = {min(1 << bit, slots) for bit in range(shapes.next_power_of_two(slots).bit_length())}
    counts |= set(layout.decode_rows)
    beyond = [
        size - 1 for size in map(shapes.next_power_of_two, range(longest, length)) if size < length
    ]
    if layout.supports_packing:
        for tokens, prompts in shapes.PACKED_SHAPES:
            count = min(prompts, slots)
            yield min(tokens // count, length - 2), count
        # Decode programs that read blocks in place do not depend on lengths; with drafts they do.
        depends = layout.programs.num_drafts > 0 or not layout.reads_in_place
        sizes = powers_of_two(longest) + beyond if depends else [1]
        counts = set(layout.decode_rows)
    else:
        sizes = [min(shapes.row_tokens(size), longest) for size in range(1, longest + 1)] + beyond
    for size in sizes:
        for count in sorted(counts):
            yield size, count


def powers_of_two(limit: int) -> list[int]:
    return [1 << bit for bit in range(limit.bit_length())]
