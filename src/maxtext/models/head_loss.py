"""The cross-entropy of the output head, and its implementations.

Shapes: B batch, S sequence, E embedding, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from maxtext.kernels import cross_entropy as triton_cross_entropy
from maxtext.kernels.cross_entropy import tiled_cross_entropy
from maxtext.kernels.fp8 import cross_entropy as fp8_cross_entropy
from maxtext.kernels.fp8 import matmul
from maxtext.kernels.triton.rowwise import TILE
from maxtext.layers.context import TRAIN, BuildContext
from maxtext.layers.linear import order_weight_grads


@dataclass(frozen=True)
class HeadSpec:
    embed_dim: int
    vocab_size: int
    dtype: DTypeLike
    exact: bool  # not in the precision of the other matmuls
    tied: bool  # the weight is the embedding
    capped: bool  # logits have a soft cap
    scaled: bool  # logits are multiplied by a constant


class HeadLoss:
    """Logits, then their cross-entropy."""

    name = "plain"
    mode: str | None = None

    @classmethod
    def unsupported_reason(cls, spec: HeadSpec, context: BuildContext) -> str | None:
        return None

    @staticmethod
    def run(
        model: Any, x: jax.Array, targets: jax.Array, tiles: int
    ) -> tuple[jax.Array, jax.Array]:
        """(loss, log of the partition sum) of each token of x [B, S, E]; see
        `kernels.cross_entropy.tiled_cross_entropy`."""
        if model.logit_cap is not None:  # capped logits are an array of their own
            return tiled_cross_entropy(model.logits, x, targets, tiles)
        platform = model.context.only_platform
        return tiled_cross_entropy(model.project_logits, x, targets, tiles, platform)


class Fp8HeadLoss(HeadLoss):
    """The head in fp8, with dlogits quantized in the pass that computes them."""

    name = "fp8 fused"
    mode = TRAIN

    @classmethod
    def unsupported_reason(cls, spec: HeadSpec, context: BuildContext) -> str | None:
        if context.precision != "fp8" or spec.exact:
            return "needs quantization=fp8_full"
        if spec.tied or spec.capped or spec.scaled:
            return "needs a weight of its own, no soft cap and no logit scale"
        shapes = [(spec.embed_dim, spec.vocab_size)]
        if not matmul.supports((TILE, spec.embed_dim), shapes, 1, context.only_platform):
            reason = context.single_gpu_unsupported_reason((8, 9))
            return reason or f"needs dimensions in tiles of {TILE}"
        return None

    @staticmethod
    def run(
        model: Any, x: jax.Array, targets: jax.Array, tiles: int
    ) -> tuple[jax.Array, jax.Array]:
        head, platform = model.head, model.context.only_platform
        tokens, vocab_size = math.prod(targets.shape), head.spec.out_shape[0]
        # Kernels address less than 2^31 logits, of whole tiles of tokens, at once.
        if tiles > 1 or not triton_cross_entropy.supports(tokens, vocab_size, platform):
            return HeadLoss.run(model, x, targets, tiles)
        x, [weight] = order_weight_grads(
            x.astype(head.dtype), [head.weight[...].astype(head.dtype)]
        )
        return fp8_cross_entropy.head_cross_entropy(x, weight, targets, head.dtype)


HEAD_LOSSES: tuple[type[HeadLoss], ...] = (Fp8HeadLoss, HeadLoss)
