"""cuDNN's flash attention on NVIDIA GPUs, through the public `jax.nn.dot_product_attention`, and
for packed rows what lies below it.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head size, Dv
value size.

Causal and window masks are cuDNN's own: it skips what they hide. JAX's window counts the keys
before the query's own, so ours (i - window < j <= i) is local_window_size = (window - 1, 0), always
with is_causal: without it JAX tells cuDNN only the left bound, and a query sees its future
(jax-ml/jax#39576).

Segments: from Hopper on, cuDNN takes the places where they begin, and computes what lies inside
them alone. It must be told how many there may be; each costs a little work, and a number for each
query and head that is kept for the backward pass, whether it is there or not. So this is done where
a row's segments are bounded, and by few (`max_packed_segments`). JAX has it in a private module. Padding is
a segment like others: what lies in none is not written, and could be anything. Else there is a
dense mask: [B, 1, S, T] in the input dtype, read by every head, and a gradient of that size that
JAX makes cuDNN write. It is far less than the [B, H, S, T] logits of dot_product, but it is
quadratic memory: with causal attention, rows that only have padding at the end need no segments at
all, since no real token sees what follows it.

Chunks of attention that divide the length are folded into the batch. Head sizes that differ are
padded with zeros to the larger, which changes no product: the public function asks for equal ones.

Precision: cuDNN multiplies bfloat16 or float16 exactly, accumulates and keeps logits in float32:
float32_logits and float32_product ask for nothing more. The softmax weights are rounded to the
input dtype for the second product.
"""

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.common.gpu import target_capability
from maxtext.kernels.attention.masks import dense_mask, zero_fully_masked_queries
from maxtext.kernels.attention.request import AttentionInputs, AttentionMask, AttentionRequest

# JAX's name of the forward computation. Rematerialization that keeps its outputs need not run it
# again: the backward one needs a statistic of each query, too, which has no name of ours.
FORWARD = "dot_product_attention_fwd_wrapper"

# The largest head size whose backward pass cuDNN has, by major compute capability.
# https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html, support
# matrix of cuDNN 9.18: Ampere and Ada 128, Hopper 256, Blackwell 128 (and two pairs of sizes beyond
# it that padding would not keep).
LARGEST_HEAD = {8: 128, 9: 256}
LARGEST_HEAD_ELSEWHERE = 128
# Tokens of a row for each segment that it may have: with fewer, a mask is as fast. One row of 8192
# tokens and 32 heads, forward and backward on an H200: 1.2 ms for 16 segments, 3.7 ms for 128, 8.3
# ms with a mask; 12 rows of 2048 tokens and 16 heads: 1.6 ms for 16, 2.2 ms for 32, 5.8 ms for 128,
# 3.2 ms with a mask.
TOKENS_OF_SEGMENT = 32
MOST_OFFSET = 2**31  # JAX counts the numbers of all queries before a segment in 32 bits
RIGHT_OFFSETS = (
    0,
    11,
    2,
)  # the JAX whose offsets are right where heads share keys, jax-ml/jax#39521


def supports(request: AttentionRequest) -> str | None:
    """None, or why cuDNN cannot do it."""
    capability = (
        request.capability or "9.0"
    )  # not known when compiling for a machine that is not here
    if request.platform != "gpu":
        return f"it needs a GPU, and this is a {request.platform.upper()}"
    if not capability.replace(".", "").isdigit():
        return f"it needs an NVIDIA GPU, and this one is {capability}"
    major = int(capability.split(".")[0])
    if major < 8:
        return f"it needs compute capability 8.0 or newer, and this GPU has {capability}"
    if request.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, not {request.dtype}"
    largest = LARGEST_HEAD.get(major, LARGEST_HEAD_ELSEWHERE)
    head_dim = max(request.head_dim, request.v_head_dim)
    if head_dim > largest or head_dim % 8:
        return f"its head size is a multiple of 8 up to {largest} on this GPU, not {head_dim}"
    if request.soft_cap is not None:
        return "it has no soft cap"
    if request.has_sinks:
        return "it has no sinks"
    if request.has_selection:
        return "it takes no selection of keys"
    if request.custom_positions or request.mask.order is not None:
        return "it counts positions from 0 and takes no others"
    if request.mask.causal and request.q_length != request.k_length:
        return f"its causal mask needs as many queries as keys, not {request.q_length} and {request.k_length}"
    if request.q_length == 1:
        return "it has no gradient for a single query"
    if request.mask.chunk is not None and request.q_length % request.mask.chunk:
        return f"chunks of {request.mask.chunk} do not divide {request.q_length} tokens"
    if request.has_segments and (request.q_length % 2 or request.k_length % 2):
        return "with segments it needs even lengths"
    return None


def run(inputs: AttentionInputs) -> Array:
    if inputs.mask.chunk is not None:
        return run_chunks(inputs, inputs.mask.chunk)
    if inputs.q_segments is not None and inputs.is_self_attention and inputs.q.size < MOST_OFFSET:
        sizes = inputs.q.shape[1], max(inputs.q.shape[-1], inputs.v.shape[-1])
        if 0 < inputs.max_segments <= max_packed_segments(*sizes):
            return run_packed(inputs)
    size = max(inputs.q.shape[-1], inputs.v.shape[-1])
    mask = inputs.mask
    window = None if mask.window is None else (mask.window - 1, 0)
    visible = None
    if inputs.q_segments is not None:
        visible = dense_mask(
            inputs
        )  # holds the window too: cuDNN before 9.10.2 takes no window next to a dense mask
        assert visible is not None
        visible, window = visible[:, None], None
    output = jax.nn.dot_product_attention(
        pad_heads(inputs.q, size),
        pad_heads(inputs.k, size),
        pad_heads(inputs.v, size),
        mask=visible,
        scale=inputs.scale,
        is_causal=mask.causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return zero_fully_masked_queries(output[..., : inputs.v.shape[-1]], inputs)


def max_packed_segments(length: int, head_dim: int) -> int:
    """How many segments a row may have so that it pays to tell cuDNN of them: what is kept is then
    no larger than the output, of 16 bits."""
    major = int(target_capability().split(".")[0])
    return min(length // TOKENS_OF_SEGMENT, head_dim // 2) if major >= 9 else 0


def run_packed(inputs: AttentionInputs) -> Array:
    from jax._src.cudnn import fused_attention_stablehlo as private

    size = max(inputs.q.shape[-1], inputs.v.shape[-1])
    q, k, v = (pad_heads(array, size) for array in (inputs.q, inputs.k, inputs.v))
    if jax.__version_info__ < RIGHT_OFFSETS:
        k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    assert inputs.q_segments is not None
    starts, lengths, fits = runs(inputs.q_segments, inputs.max_segments)
    masks = private.MaskType
    output = private.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=inputs.scale,
        mask_type=masks.PADDING_CAUSAL if inputs.mask.causal else masks.PADDING,
        sliding_window_length=inputs.mask.window,
    )
    output = jnp.where(fits[:, None, None, None], output[..., : inputs.v.shape[-1]], jnp.nan)
    return zero_fully_masked_queries(output, inputs)


def runs(segments: Array, most: int) -> tuple[Array, Array, Array]:
    """Where runs of equal segments [B, S] begin, [B, most + 1], and how long they are, [B, most],
    both filled up with -1; and whether a row has no more than `most`, [B]."""
    rows, length = segments.shape
    begins = jnp.concatenate(
        [jnp.ones((rows, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1
    )
    number = jnp.cumsum(begins, axis=1) - 1
    place = jnp.where(begins & (number < most), number, most + 1)  # out of bounds: not written
    starts = jnp.full((rows, most + 1), -1, jnp.int32)
    starts = starts.at[jnp.arange(rows)[:, None], place].set(
        jnp.arange(length, dtype=jnp.int32), mode="drop"
    )
    ends = jnp.where(starts[:, 1:] < 0, length, starts[:, 1:])
    lengths = jnp.where(starts[:, :-1] < 0, -1, ends - starts[:, :-1])
    return starts, lengths, number[:, -1] < most


def run_chunks(inputs: AttentionInputs, chunk: int) -> Array:
    """Chunks do not see each other, so they are rows of a larger batch, causal inside."""

    def fold(array: Array) -> Array:
        return array.reshape(-1, chunk, *array.shape[2:])

    q_segments, k_segments = inputs.q_segments, inputs.k_segments
    if q_segments is not None and k_segments is not None:
        shared = q_segments is k_segments
        q_segments = fold(q_segments)
        k_segments = q_segments if shared else fold(k_segments)
    folded = AttentionInputs(
        q=fold(inputs.q),
        k=fold(inputs.k),
        v=fold(inputs.v),
        mask=AttentionMask(causal=True),
        scale=inputs.scale,
        q_segments=q_segments,
        k_segments=k_segments,
        max_segments=inputs.max_segments,
    )
    return run(folded).reshape(*inputs.q.shape[:3], inputs.v.shape[-1])


def pad_heads(array: Array, size: int) -> Array:
    missing = size - array.shape[-1]
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else array
