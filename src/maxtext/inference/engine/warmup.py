"""Requests that compile the programs which later requests need."""

from collections.abc import Iterator
from dataclasses import replace

from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine import shapes
from maxtext.inference.engine.batches import MAX_DECODE_STEPS
from maxtext.inference.engine.executor import Executor
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams


def warmup_requests(
    config: MaxTextConfig, params: SamplingParams, executor: Executor
) -> Iterator[list[GenerationRequest]]:
    """Lists of requests for prompts up to max_prefill_predict_length, or of any length where they
    share rows, sequences up to max_target_length, and tokens that are sampled as with `params`.
    """
    length, vocab_size = config.max_target_length, config.vocab_size
    params = replace(params, ignore_eos=True, logprobs=0 if config.return_log_prob else None)
    # Where decode programs have a fixed number of steps, a completion ends with another one.
    new_tokens = MAX_DECODE_STEPS + 2 if executor.few_programs else 2
    prompt_index = 0
    for size, count in dict.fromkeys(prompt_shapes(config, executor)):
        params = replace(params, max_new_tokens=min(new_tokens, length - size))
        requests = []
        for _ in range(count):
            prompt_index += 1  # a new first token, so that no prefix is cached
            prompt = [prompt_index // vocab_size % vocab_size] * size
            prompt[0] = prompt_index % vocab_size
            requests.append(GenerationRequest(prompt, params))
        yield requests


def prompt_shapes(config: MaxTextConfig, executor: Executor) -> Iterator[tuple[int, int]]:
    """The length of prompts and their number, for each program."""
    slots, length = config.global_batch_size_to_load, config.max_target_length
    longest = min(config.max_prefill_predict_length, length - 2)
    counts = {min(1 << bit, slots) for bit in range(shapes.next_power_of_two(slots).bit_length())}
    counts |= set(executor.decode_rows)
    beyond = [
        size - 1 for size in map(shapes.next_power_of_two, range(longest, length)) if size < length
    ]
    if executor.supports_packing:
        for tokens, prompts in shapes.PACKED_SHAPES:
            count = min(prompts, slots)
            yield min(tokens // count, length - 2), count
        # Decode programs that read blocks in place do not depend on lengths.
        sizes = [1] if executor.reads_in_place else powers_of_two(longest) + beyond
        counts = set(executor.decode_rows)
    else:
        sizes = [min(shapes.row_tokens(size), longest) for size in range(1, longest + 1)] + beyond
    for size in sizes:
        for count in sorted(counts):
            yield size, count


def powers_of_two(limit: int) -> list[int]:
    return [1 << bit for bit in range(limit.bit_length())]
