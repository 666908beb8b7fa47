"""The loss of supervised fine-tuning.

Shapes: B batch, T tokens.
"""

from jax import Array
from jax.typing import ArrayLike

from maxtext.trainers.losses.common import divisor, float32, masked_sum


def sft(
    logps: ArrayLike, mask: ArrayLike, *, tokens: ArrayLike | None = None
) -> tuple[Array, dict[str, Array]]:
    """loss = Σ mask·(−logps) / max(N, 1), N = Σ mask, or `tokens` if given.

    logps and mask [B, T]; the mask is 1 at tokens that are trained on. With the `tokens` of the
    whole batch, the losses of microbatches sum to that of the batch.

    Metrics: `tokens`, the number of tokens in the mask.
    """
    mask = float32(mask)
    count = mask.sum()
    loss = -masked_sum(float32(logps), mask) / divisor(count if tokens is None else tokens)
    return loss, {"tokens": count}
