"""Log-likelihoods of given tokens, in batches of few shapes.

    loglikelihood = Σ_i log p(token_i | tokens before i), over the tokens of a span

Log-probabilities are computed on the device, a few tokens at a time: the host gets one number a
token. Spans of sequences that differ in their last token only, as choices of one token do, share a
row. Shapes: B rows of a batch, S tokens of a row, K choices of its last target.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.inference.engine import shapes
from maxtext.inference.llm import LLM
from maxtext.inference.text.session import check_positions

Progress = Callable[[int, int], None]  # (number of spans that are done, of all)


@dataclass(frozen=True)
class TokenSpan:
    """The tokens of a sequence from index `start` on, which is at least 1. Those before are their
    context.
    """

    token_ids: Sequence[int] | np.ndarray
    start: int


@dataclass(frozen=True)
class Row:
    """A sequence without its last token, and the indices of its spans."""

    token_ids: np.ndarray
    spans: list[int]


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
    rows = share_rows(spans)
    results: dict[int, Loglikelihood] = {}
    for indices in batch_indices([len(row.token_ids) for row in rows]):
        results |= run_batch(llm, spans, [rows[index] for index in indices])
        if progress is not None:
            progress(len(results), len(spans))
    return [results[index] for index in range(len(spans))]


def share_rows(spans: Sequence[TokenSpan]) -> list[Row]:
    rows: dict[bytes, Row] = {}
    for index, span in enumerate(spans):
        token_ids = np.asarray(span.token_ids[:-1], np.int64)
        rows.setdefault(token_ids.tobytes(), Row(token_ids, [])).spans.append(index)
    return list(rows.values())


def batch_indices(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The indices of sequences in batches, the longest first: time and memory do not grow later,
    and a batch has rows of about the same length.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        rows = shapes.max_prefill_rows(shapes.row_tokens(lengths[order[0]]))
        yield order[:rows]
        order = order[rows:]


def run_batch(
    llm: LLM, spans: Sequence[TokenSpan], rows: Sequence[Row]
) -> dict[int, Loglikelihood]:
    """The log-likelihoods of the spans of rows, by index. The batch is padded to one of few
    shapes.
    """
    longest = max(len(row.token_ids) for row in rows)
    check_positions(llm.config, longest)
    width = shapes.row_tokens(longest)
    if llm.config.trainable_position_size > 0:
        width = min(width, llm.config.trainable_position_size)
    num_rows = shapes.next_power_of_two(len(rows))
    inputs = np.zeros((num_rows, width), np.int64)
    targets = np.zeros_like(inputs)
    lengths = np.ones(num_rows, np.int32)
    num_choices = shapes.next_power_of_two(max(len(row.spans) for row in rows))
    last_targets = np.zeros((num_rows, num_choices), np.int64)
    for number, row in enumerate(rows):
        lengths[number] = length = len(row.token_ids)
        inputs[number, :length] = row.token_ids
        targets[number, : length - 1] = row.token_ids[1:]
        last_targets[number, : len(row.spans)] = [spans[index].token_ids[-1] for index in row.spans]
    llm.check_token_ids(inputs)
    llm.check_token_ids(last_targets)
    token_logprobs, most_likely, choices = run_program(llm, inputs, targets, lengths, last_targets)
    results = {}
    for number, row in enumerate(rows):
        last = int(lengths[number]) - 1
        is_right = most_likely[number] == targets[number]
        for choice, index in enumerate(row.spans):
            before = slice(spans[index].start - 1, last)
            logprob = float(np.sum(token_logprobs[number, before], dtype=np.float64))
            logprob += float(choices[number, choice])
            if np.isnan(logprob):
                raise UserError(
                    "the model's logits are NaN or infinite: check its weights, and dtype=float32"
                )
            is_greedy = most_likely[number, last] == last_targets[number, choice]
            results[index] = Loglikelihood(logprob, bool(is_greedy and is_right[before].all()))
    return results


def run_program(llm: LLM, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of token ids [B, S], targets [B, S], lengths [B] and last targets [B, K]: log-probabilities
    of the targets [B, S], the most likely tokens [B, S], and log-probabilities of the last targets
    [B, K].
    """
    programs = llm.programs
    ids = jnp.asarray(llm.adapters.ids([None] * len(arrays[0])))
    token_ids, targets, lengths, last = (jnp.asarray(array, jnp.int32) for array in arrays)
    with programs.context():
        has_adapters = programs.build.adapters is not None
        logprobs, choices = programs.target_logprobs(
            llm.weights, token_ids, targets, lengths, last, ids if has_adapters else None
        )
    return jax.device_get((logprobs.token, logprobs.top_ids[..., 0], choices))
