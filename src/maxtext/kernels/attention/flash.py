"""Flash attention on TPUs: the splash kernel of JAX, vmapped over batch rows; the kernel groups
heads.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head dim, Dv head
dim of values.

The kernel skips the blocks that the causal, window or chunk mask hides, and applies segment ids
within the others; it supports a soft cap and sinks. To the kernel padding (segment 0) is a segment
that sees itself, so the outputs of these queries, and of all without a visible key, are set to zero
afterwards.

Precision: the kernel has no scale, so queries are scaled first, in float32, and rounded back to
their dtype. Matmuls accumulate in float32, and logits, softmax and weights are float32, so
float32_logits and float32_product change nothing: float32 holds the product of two bfloat16 values
exactly. Sinks are rounded to the dtype of the queries, because the kernel returns their gradient in
it.

`interpret=True` runs the kernel on any platform, slowly, for tests.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext.common.types import Tree
from maxtext.kernels.attention.masks import zero_fully_masked_queries
from maxtext.kernels.attention.request import (
    AttentionInputs,
    AttentionMask,
    AttentionRequest,
    BlockSizes,
)
from maxtext.kernels.attention_options import TILE


def unsupported_reason(request: AttentionRequest) -> str | None:
    """None, or why the kernel does not support the request."""
    if request.platform != "tpu":
        return f"it needs a TPU, and this is a {request.platform.upper()}"
    if request.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 or float32, not {request.dtype}"
    if request.q_length % TILE or request.k_length % TILE:
        return f"its lengths are multiples of {TILE}, not {request.q_length} and {request.k_length}"
    if request.has_selection:
        return "it takes no selection of keys"
    if request.custom_positions:
        return "it counts positions from 0 and takes no others"
    if request.mask.causal and request.q_length != request.k_length:
        return (
            f"its causal mask needs as many queries as keys, not {request.q_length} and "
            f"{request.k_length}"
        )
    return None


def run(inputs: AttentionInputs, interpret: bool = False) -> Array:
    kernel = make_kernel(inputs, inputs.q.shape[2], interpret=interpret)
    return zero_fully_masked_queries(run_kernel(kernel, inputs), inputs)


def make_kernel(inputs: AttentionInputs, heads: int, shards: int = 1, interpret: bool = False):
    """The kernel for all queries and `heads` of their heads. It holds its mask as arrays; if
    queries are split into `shards`, each shard uses a part of them (see
    layers/attention_sharding.py)."""
    # Imported here: Pallas takes a second to import, and only a TPU needs it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    q_length, k_length = inputs.q.shape[1], inputs.k.shape[1]
    return splash.make_splash_mha(
        splash.MultiHeadMask([splash_mask(inputs.mask, q_length, k_length)] * heads),
        block_sizes=splash_blocks(inputs.block_sizes or BlockSizes(), q_length // shards, k_length),
        attn_logits_soft_cap=inputs.soft_cap,
        head_shards=1,
        q_seq_shards=shards,
        # The name of the saved outputs, for remat policies.
        residual_checkpoint_name="context",
        interpret=interpret,
    )


def run_kernel(kernel: Callable[..., Array], inputs: AttentionInputs) -> Array:
    """[B, S, H, Dv] of the kernel's queries; undefined for queries without a visible key."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    q = (inputs.q.astype(jnp.float32) * inputs.scale).astype(inputs.q.dtype)
    segments = None
    if inputs.q_segments is not None and inputs.k_segments is not None:
        segments = splash.SegmentIds(q=inputs.q_segments, kv=inputs.k_segments)
    sinks = None if inputs.sinks is None else inputs.sinks.astype(inputs.q.dtype)
    heads_first = [array.swapaxes(1, 2) for array in (q, inputs.k, inputs.v)]
    return vmap_kernel(kernel, *heads_first, segments, sinks).swapaxes(1, 2)


def apply_kernel(
    kernel: Callable[..., Array], q: Array, k: Array, v: Array, segments: Tree, sinks: Array | None
) -> Array:
    return jax.vmap(kernel, in_axes=(0, 0, 0, None if segments is None else 0, None))(
        q, k, v, segments, sinks
    )


def apply_kernel_forward(
    kernel: Callable[..., Array], q: Array, k: Array, v: Array, segments: Tree, sinks: Array | None
) -> tuple:
    """The output, and the VJP with its residuals, which the barrier computes before the output is
    used: the kernel writes the log-sum-exp of each query 128 times, and XLA may otherwise keep all
    copies until the backward kernels read one."""

    def run(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        return apply_kernel(kernel, q, k, v, segments, sinks)

    return jax.lax.optimization_barrier(jax.vjp(run, q, k, v, sinks))


def apply_kernel_backward(vjp: Callable[[Array], tuple], dout: Array) -> tuple:
    dq, dk, dv, dsinks = vjp(dout)
    return None, dq, dk, dv, None, dsinks


vmap_kernel = jax.custom_vjp(apply_kernel)
vmap_kernel.defvjp(apply_kernel_forward, apply_kernel_backward)


def splash_mask(mask: AttentionMask, q_length: int, k_length: int):
    """The kernel's own mask class if it has one. The kernel reads masks block by block."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (q_length, k_length)
    if not mask.causal:
        return splash.FullMask(shape)
    if mask.order is not None:
        return computed_mask(shape, mask)
    if mask.window is not None:
        return splash.LocalMask(shape, window_size=(mask.window - 1, 0), offset=0)
    if mask.chunk is not None:
        return computed_mask(shape, mask)
    return splash.CausalMask(shape)


def computed_mask(shape: tuple[int, int], mask: AttentionMask):
    """A mask that the kernel has no class for: chunks, or permuted tokens. The kernel stores equal
    blocks once, so a chunk that is a multiple of the block size costs one triangle."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    class ComputedMask(splash.Mask):
        def __init__(self) -> None:
            self.key = (shape, mask)

        @property
        def shape(self) -> tuple[int, ...]:
            return shape

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            rows, columns = (
                mask.positions(length)[part] for part, length in zip(index, shape, strict=True)
            )
            rows, columns = rows[:, None], columns[None, :]
            visible = columns <= rows
            if mask.window is not None:
                visible &= columns > rows - mask.window
            if mask.chunk is not None:
                visible &= rows // mask.chunk == columns // mask.chunk
            return visible

        # Equal masks are processed once, for all heads and, by a cache, for all layers.
        def __eq__(self, other: object) -> bool:
            return getattr(other, "key", None) == self.key

        def __hash__(self) -> int:
            return hash(self.key)

    return ComputedMask()


def splash_blocks(sizes: BlockSizes, q_length: int, k_length: int):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    kv, kv_dkv = fit_block(sizes.kv, k_length), fit_block(sizes.kv_dkv, k_length)
    return splash.BlockSizes(
        block_q=fit_block(sizes.q, q_length),
        block_kv=kv,
        block_kv_compute=fit_block(sizes.kv_compute, kv),
        block_q_dkv=fit_block(sizes.q_dkv, q_length),
        block_kv_dkv=kv_dkv,
        block_kv_dkv_compute=fit_block(sizes.kv_dkv_compute, kv_dkv),
        block_q_dq=None if sizes.use_fused_bwd else fit_block(sizes.q_dq, q_length),
        block_kv_dq=None if sizes.use_fused_bwd else fit_block(sizes.kv_dq, k_length),
        use_fused_bwd_kernel=sizes.use_fused_bwd,
        q_layout=splash.QKVLayout[sizes.q_layout],
        k_layout=splash.QKVLayout[sizes.k_layout],
        v_layout=splash.QKVLayout[sizes.v_layout],
    )


def fit_block(size: int, length: int) -> int:
    """The largest multiple of 128 up to `size` that divides `length`, itself a multiple of 128."""
    tiles = length // TILE
    return TILE * max(
        count for count in range(1, min(size // TILE, tiles) + 1) if tiles % count == 0
    )
