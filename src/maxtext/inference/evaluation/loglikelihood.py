"""Log-likelihoods of given tokens, in batches of few shapes.

    loglikelihood = Σ_i log p(token_i | tokens before i), over the tokens of a span

Log-probabilities are computed on the device, a few tokens at a time: the host gets one number a
token. Shapes: B rows of a batch, S tokens of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.inference import shapes
from maxtext.inference.llm import LLM
from maxtext.inference.processing import check_positions

Progress = Callable[[int, int], None]  # (number of spans that are done, of all)


@dataclass(frozen=True)
class TokenSpan:
    """The tokens of a sequence from index `start` on, which is at least 1. Those before are their
    context.
    """

    token_ids: Sequence[int] | np.ndarray
    start: int


@dataclass(frozen=True)
class Loglikelihood:
    """Of the tokens of a span."""

    logprob: float
    is_greedy: bool  # whether each is the most likely token at its position


def compute_loglikelihoods(
    llm: LLM, spans: Sequence[TokenSpan], progress: Progress | None = None
) -> list[Loglikelihood]:
    """The log-likelihoods of spans, in their order. Raises UserError if logits are not finite."""
    if llm.config.capacity_factor > 0:
        raise ConfigError(
            f"capacity_factor={llm.config.capacity_factor:g} lets experts drop tokens, so that a "
            "log-likelihood would depend on the rest of its batch: leave it out, or set -1"
        )
    results: list[Loglikelihood | None] = [None] * len(spans)
    done = 0
    for indices in batch_indices([len(span.token_ids) - 1 for span in spans]):
        batch = [spans[index] for index in indices]
        for index, result in zip(indices, run_batch(llm, batch), strict=True):
            results[index] = result
        done += len(batch)
        if progress is not None:
            progress(done, len(spans))
    return [result for result in results if result is not None]


def batch_indices(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The indices of sequences in batches, the longest first: time and memory do not grow later,
    and a batch has rows of about the same length.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        rows = shapes.max_prefill_rows(shapes.row_tokens(lengths[order[0]]))
        yield order[:rows]
        order = order[rows:]


def run_batch(llm: LLM, spans: Sequence[TokenSpan]) -> list[Loglikelihood]:
    """The log-likelihoods of spans that share a batch, padded to one of few shapes."""
    longest = max(len(span.token_ids) for span in spans) - 1
    check_positions(llm.config, longest)
    width = shapes.row_tokens(longest)
    if llm.config.trainable_position_size > 0:
        width = min(width, llm.config.trainable_position_size)
    rows = shapes.next_power_of_two(len(spans))
    inputs = np.zeros((rows, width), np.int32)
    targets = np.zeros((rows, width), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, span in enumerate(spans):
        tokens = np.asarray(span.token_ids)
        lengths[row] = len(tokens) - 1
        inputs[row, : lengths[row]] = tokens[:-1]
        targets[row, : lengths[row]] = tokens[1:]
    llm.check_token_ids(inputs)
    llm.check_token_ids(targets)
    programs = llm.programs
    adapter_ids = llm.adapters.ids([None] * rows) if programs.build.adapters is not None else None
    with programs.context():
        logprobs = programs.target_logprobs(
            llm.weights, *map(jnp.asarray, (inputs, targets, lengths)), adapter_ids
        )
    token_logprobs, most_likely = jax.device_get((logprobs.token, logprobs.top_ids[..., 0]))
    results = []
    for row, span in enumerate(spans):
        scored = slice(span.start - 1, lengths[row])
        logprob = float(np.sum(token_logprobs[row, scored], dtype=np.float64))
        if np.isnan(logprob):
            raise UserError(
                "the model's logits are NaN or infinite: check its weights, and dtype=float32"
            )
        is_greedy = bool(np.all(most_likely[row, scored] == targets[row, scored]))
        results.append(Loglikelihood(logprob, is_greedy))
    return results
