"""Requests that compile the programs which later requests need."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from maxtext.configs.types import MaxTextConfig
from maxtext.inference.batches import MAX_DECODE_STEPS
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling_params import SamplingParams
from maxtext.inference.shapes import next_power_of_two, row_tokens


def warmup_requests(
    config: MaxTextConfig, params: SamplingParams, decode_rows: Iterable[int], static_steps: bool
) -> Iterator[list[GenerationRequest]]:
    """Lists of requests for prompts up to max_prefill_predict_length, sequences up to
    max_target_length, and tokens that are sampled as with `params`.

    `decode_rows` are the batch sizes of decode programs. With `static_steps`, a decode program has
    a fixed number of steps, so that the remainder of a completion needs another program.
    """
    slots, length = config.global_batch_size_to_load, config.max_target_length
    vocab_size = config.vocab_size
    longest = min(config.max_prefill_predict_length, length - 2)
    sizes = sorted({min(row_tokens(size), longest) for size in range(1, longest + 1)})
    sizes += [size - 1 for size in map(next_power_of_two, range(longest, length)) if size < length]
    counts = {min(1 << bit, slots) for bit in range(next_power_of_two(slots).bit_length())}
    counts |= set(decode_rows)
    logprobs = 0 if config.return_log_prob else None
    params = replace(params, ignore_eos=True, logprobs=logprobs)
    prompt_index = 0
    for size in dict.fromkeys(sizes):
        max_new_tokens = min(MAX_DECODE_STEPS + 2, length - size) if static_steps else 2
        params = replace(params, max_new_tokens=max_new_tokens)
        for count in sorted(counts):
            requests = []
            for _ in range(count):
                prompt_index += 1  # a new first token, so that no prefix is cached
                prompt = [prompt_index // vocab_size % vocab_size] * size
                prompt[0] = prompt_index % vocab_size
                requests.append(GenerationRequest(prompt, params))
            yield requests
