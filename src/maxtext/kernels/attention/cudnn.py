"""cuDNN's flash attention on NVIDIA GPUs, by `jax.nn.dot_product_attention`, and for packed rows by
the private function below it.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head dim, Dv head
dim of values.

Causal and window masks are cuDNN's own: it skips masked blocks. JAX's window excludes the query's
own key, so a window (i - window < j <= i) is local_window_size = (window - 1, 0), always with
is_causal: without it JAX passes only the left bound to cuDNN, and a query sees its future
(jax-ml/jax#39576).

Segments: from Hopper on, cuDNN takes the offsets of segments and computes attention only within
them. It needs an upper bound on their number; each possible segment costs some work and one saved
value for each query and head, whether it exists or not. So offsets are used only if segments are
bounded, and by few (`max_packed_segments`). JAX exposes this only in a private module. Padding is
a segment like others: rows outside of all segments would not be written. Without offsets, segments
are a dense mask: [B, 1, S, T] in the input dtype, read by every head, and a gradient of that size
that JAX makes cuDNN write. It is far smaller than the [B, H, S, T] logits of dot_product, but it is
quadratic memory. Positions that are given, as those of a chunk of a prompt and its cache, are part
of that mask. With causal attention, rows that are only padded at the end need no segments: no
real token sees the padding after it.

Chunks that divide the length are folded into the batch. If the head dims of keys and values differ,
the smaller is zero-padded: the public function requires equal ones.

Precision: cuDNN multiplies bfloat16 or float16 exactly, accumulates in float32 and keeps logits in
float32, so float32_logits and float32_product change nothing. The softmax weights are rounded to
the input dtype for the second matmul.
"""

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.common.hardware import target_capability
from maxtext.kernels.attention.masks import dense_mask, zero_fully_masked_queries
from maxtext.kernels.attention.request import AttentionInputs, AttentionMask, AttentionRequest

# JAX's name of the forward primitive. A remat policy that saves its outputs does not run it again:
# the backward pass also needs the softmax statistics, which cannot be tagged.
FORWARD_PRIMITIVE = "dot_product_attention_fwd_wrapper"

# The largest head dim whose backward pass cuDNN supports, by major compute capability.
# https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html, support
# matrix of cuDNN 9.18: Ampere and Ada 128, Hopper 256, Blackwell 128 (and two pairs of larger dims,
# which zero-padding excludes).
MAX_HEAD_DIM = {8: 128, 9: 256}
DEFAULT_MAX_HEAD_DIM = 128
# With fewer tokens of a row for each possible segment, a dense mask is as fast. One row of 8192
# tokens and 32 heads, forward and backward on an H200: 1.2 ms for 16 segments, 3.7 ms for 128, 8.3
# ms with a mask; 12 rows of 2048 tokens and 16 heads: 1.6 ms for 16, 2.2 ms for 32, 5.8 ms for 128,
# 3.2 ms with a mask.
MIN_TOKENS_PER_SEGMENT = 32
MAX_OFFSET = 2**31  # JAX computes the element offset of a segment in 32 bits
FIXED_GQA_OFFSETS = (0, 11, 2)  # the JAX that fixed offsets with GQA, jax-ml/jax#39521


def unsupported_reason(request: AttentionRequest) -> str | None:
    """None, or why cuDNN does not support the request."""
    capability = request.capability or "9.0"  # unknown in ahead-of-time compilation
    if request.platform != "gpu":
        return f"it needs a GPU, and this is a {request.platform.upper()}"
    if not capability.replace(".", "").isdigit():
        return f"it needs an NVIDIA GPU, and this one is {capability}"
    major = int(capability.split(".")[0])
    if major < 8:
        return f"it needs compute capability 8.0 or newer, and this GPU has {capability}"
    if request.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, not {request.dtype}"
    largest = MAX_HEAD_DIM.get(major, DEFAULT_MAX_HEAD_DIM)
    head_dim = max(request.head_dim, request.v_head_dim)
    if head_dim > largest or head_dim % 8:
        return f"its head dim is a multiple of 8 up to {largest} on this GPU, not {head_dim}"
    if request.soft_cap is not None:
        return "it has no soft cap"
    if request.has_sinks:
        return "it has no sinks"
    if request.has_selection:
        return "it takes no selection of keys"
    if request.mask.order is not None or (request.custom_positions and not request.has_segments):
        return "it counts positions from 0 and takes no others, but in a dense mask with segments"
    if request.custom_positions and request.mask.chunk is not None:
        return "with positions it has no chunks"
    dense = request.custom_positions
    if request.mask.causal and not dense and request.q_length != request.k_length:
        return (
            "its causal mask needs as many queries as keys, "
            f"not {request.q_length} and {request.k_length}"
        )
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
    if inputs.q_segments is not None and inputs.is_self_attention and inputs.q.size < MAX_OFFSET:
        head_dim = max(inputs.q.shape[-1], inputs.v.shape[-1])
        if 0 < inputs.max_segments <= max_packed_segments(inputs.q.shape[1], head_dim):
            return run_packed(inputs)
    head_dim = max(inputs.q.shape[-1], inputs.v.shape[-1])
    mask = inputs.mask
    window = None if mask.window is None else (mask.window - 1, 0)
    visible = None
    if inputs.q_segments is not None:
        # With the window in it: cuDNN before 9.10.2 takes no window next to a dense mask.
        visible = dense_mask(inputs)
        assert visible is not None
        visible, window = visible[:, None], None
    output = jax.nn.dot_product_attention(
        pad_heads(inputs.q, head_dim),
        pad_heads(inputs.k, head_dim),
        pad_heads(inputs.v, head_dim),
        mask=visible,
        scale=inputs.scale,
        is_causal=mask.causal and not inputs.custom_positions,
        local_window_size=window,
        implementation="cudnn",
    )
    return zero_fully_masked_queries(output[..., : inputs.v.shape[-1]], inputs)


def max_packed_segments(length: int, head_dim: int) -> int:
    """Up to how many segments of a row offsets are faster than a dense mask: the saved float32
    statistics are then no larger than the 16-bit output."""
    major = int(target_capability().split(".")[0])
    return min(length // MIN_TOKENS_PER_SEGMENT, head_dim // 2) if major >= 9 else 0


def run_packed(inputs: AttentionInputs) -> Array:
    from jax._src.cudnn import fused_attention_stablehlo as private

    head_dim = max(inputs.q.shape[-1], inputs.v.shape[-1])
    q, k, v = (pad_heads(array, head_dim) for array in (inputs.q, inputs.k, inputs.v))
    if jax.__version_info__ < FIXED_GQA_OFFSETS:
        k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    assert inputs.q_segments is not None
    starts, lengths, fits = segment_runs(inputs.q_segments, inputs.max_segments)
    mask_types = private.MaskType
    output = private.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=inputs.scale,
        mask_type=mask_types.PADDING_CAUSAL if inputs.mask.causal else mask_types.PADDING,
        sliding_window_length=inputs.mask.window,
    )
    output = jnp.where(fits[:, None, None, None], output[..., : inputs.v.shape[-1]], jnp.nan)
    return zero_fully_masked_queries(output, inputs)


def segment_runs(segments: Array, max_runs: int) -> tuple[Array, Array, Array]:
    """The starts [B, max_runs + 1] and lengths [B, max_runs] of the runs of equal segments [B, S],
    both padded with -1; and whether a row has no more than `max_runs`, [B]."""
    rows, length = segments.shape
    begins = jnp.concatenate(
        [jnp.ones((rows, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1
    )
    run = jnp.cumsum(begins, axis=1) - 1
    index = jnp.where(begins & (run < max_runs), run, max_runs + 1)  # out of bounds: not written
    starts = jnp.full((rows, max_runs + 1), -1, jnp.int32)
    starts = starts.at[jnp.arange(rows)[:, None], index].set(
        jnp.arange(length, dtype=jnp.int32), mode="drop"
    )
    ends = jnp.where(starts[:, 1:] < 0, length, starts[:, 1:])
    lengths = jnp.where(starts[:, :-1] < 0, -1, ends - starts[:, :-1])
    return starts, lengths, run[:, -1] < max_runs


def run_chunks(inputs: AttentionInputs, chunk: int) -> Array:
    """Chunks do not see each other, so they become causal rows of a larger batch."""

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


def pad_heads(array: Array, head_dim: int) -> Array:
    missing = head_dim - array.shape[-1]
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else array
