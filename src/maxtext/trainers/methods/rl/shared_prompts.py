"""Tokens of prompts that an update computes once for all completions of a group.

Every length is a compiled program, so there are few: multiples of an eighth of
max_prefill_predict_length, less one, since the output of a prompt's last token predicts the first
of each completion. The choice depends on nothing but the batch, so that a resumed run computes the
same bits.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from maxtext.common.sequences import common_prefix_length
from maxtext.layers.specs import AttentionSpec, LayerSpec
from maxtext.models.registry import layers

if TYPE_CHECKING:
    from maxtext.trainers.run_context import RunContext

NUM_LENGTHS = 8


def shared_prefix(context: "RunContext", prompt_lengths: Iterable[int]) -> int:
    """How many tokens the step computes once for the completions of a prompt, for prompts of these
    lengths."""
    config = context.config
    if not supports_shared_prompts(context):
        return 0
    unit = max(config.max_prefill_predict_length // NUM_LENGTHS, 1)
    length = min(prompt_lengths, default=1) // unit * unit - 1
    # The logits of the tokens between these and a row's last are computed in tiles of equal size.
    while length > 0 and (config.max_target_length - length - 1) % config.num_vocab_tiling:
        length -= unit
    return max(length, 0)


def common_lengths(prompts: Sequence[tuple[int, ...]], rows: int) -> list[int]:
    """How many tokens the prompts of each group of `rows` begin with together: all of a prompt,
    unless an environment begins the conversations of a group differently."""
    groups = (prompts[start : start + rows] for start in range(0, len(prompts), rows))
    # All prompts of a group begin as the first and the last of them in lexicographic order do.
    return [common_prefix_length(min(group), max(group)) for group in groups]


def supports_shared_prompts(context: "RunContext") -> bool:
    """Whether all layers but attention compute each token by itself, and the rows of a group are on
    one device. Experts with a capacity, and their balance, depend on the tokens of a batch."""
    config = context.config
    rows = config.global_batch_size_to_train_on // config.gradient_accumulation_steps
    if context.rules.mesh.size > 1 or rows % config.num_generations:
        return False
    if config.compiled_trainstep_file or config.quantization or config.num_experts > 1:
        return False
    return all(
        isinstance(layer, LayerSpec)
        and type(layer.attention) is AttentionSpec
        and not layer.attention.has_selection
        and layer.engram is None
        for layer in layers(config)
    )


def group_microbatches(fields: dict[str, np.ndarray], microbatches: int) -> dict[str, np.ndarray]:
    """The rows [B, ...] in the order in which microbatch i has the i-th B / microbatches of them:
    row b goes to microbatch b % microbatches (see step.py)."""
    order = np.arange(len(next(iter(fields.values())))).reshape(microbatches, -1).T.ravel()
    return {name: field[order] for name, field in fields.items()}
