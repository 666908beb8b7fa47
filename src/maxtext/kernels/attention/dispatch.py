"""Which back end computes attention: `attend` runs the one that was named, or chooses and says so
once.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head size, Dv
value size. A back end is two functions: `supports(request)` gives None or a reason in words,
`run(inputs)` the output. A named back end that does not support the request is an error: nothing
falls back in silence.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext.common.errors import ConfigError
from maxtext.common.gpu import gpu_capability
from maxtext.common.log import LOGGER
from maxtext.kernels.attention import cudnn, dot_product, flash
from maxtext.kernels.attention.checks import validate_inputs
from maxtext.kernels.attention.request import (
    AttentionInputs,
    AttentionMask,
    AttentionRequest,
    BlockSizes,
)


@dataclass(frozen=True)
class Backend:
    name: str
    supports: Callable[[AttentionRequest], str | None]
    run: Callable[[AttentionInputs], Array]
    platform: str | None = None  # the only one it runs on
    opaque: bool = False  # the compiler cannot split it over devices


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("dot_product", dot_product.supports, dot_product.run),
        Backend("flash", flash.supports, flash.run, platform="tpu", opaque=True),
        Backend("cudnn_flash_jax", cudnn.supports, cudnn.run, platform="gpu"),
    )
}
AUTOSELECTED = "autoselected"
FASTEST_FIRST = {"gpu": ("cudnn_flash_jax", "dot_product"), "tpu": ("flash", "dot_product")}
ANYWHERE = ("dot_product",)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    backend: str,
    mask: AttentionMask,
    scale: float,
    q_positions: Array | None = None,
    k_positions: Array | None = None,
    q_segments: Array | None = None,
    k_segments: Array | None = None,
    max_segments: int = 0,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    selected: Array | None = None,
    float32_logits: bool = False,
    float32_product: bool = False,
    block_sizes: BlockSizes | None = None,
    platform: str | None = None,
) -> Array:
    """softmax(scale * q k + mask) v, as [B, S, H, Dv] in q's dtype.

    q [B, S, H, D], k [B, T, K, D], v [B, T, K, Dv], one dtype; query head h uses key/value head h
    // (H / K). q_positions [B, S], k_positions [B, T]: what `mask` compares; None is the
    index, 0..S-1 and 0..T-1. Give them
        only where the index would be wrong: packed rows need none for causal attention or a window (inside a segment
        the differences are the same), and the fast back ends take none.
    q_segments [B, S], k_segments [B, T]: tokens see only their own segment. Segment 0 is padding:
    it sees nothing and
        yields 0. k_segments None is q_segments.
    max_segments: how many runs of equal q_segments a row has at most, padding among them, which
    some back ends need to
        be fast; 0: not known. Rows that have more become not-a-number where it was needed.
    soft_cap: logits become cap * tanh(logits / cap), after the scale and before the mask. sinks
    [H]: a learned logit in the denominator of each head's softmax. selected [B, 1 or H, S, T]: True
    for keys that a query may see, beside what mask and segments ask. float32_logits,
    float32_product: see dot_product; the other back ends always do as much. block_sizes: tiles of
    the flash back end; others have none to set. backend: a name in BACKENDS, or "autoselected".
    platform: of the default JAX backend unless given.
    """
    inputs = AttentionInputs(
        q=q,
        k=k,
        v=v,
        mask=mask,
        scale=scale,
        q_positions=q_positions,
        k_positions=k_positions,
        q_segments=q_segments,
        k_segments=k_segments,
        max_segments=max_segments,
        soft_cap=soft_cap,
        sinks=sinks,
        selected=selected,
        float32_logits=float32_logits,
        float32_product=float32_product,
        block_sizes=block_sizes,
    )
    return run_attention(inputs, backend, platform)


def run_attention(inputs: AttentionInputs, backend: str, platform: str | None = None) -> Array:
    """As `attend`, from inputs that are gathered already."""
    inputs = validate_inputs(inputs)
    return select_backend(inputs, backend, platform).run(inputs)


def select_backend(inputs: AttentionInputs, backend: str, platform: str | None = None) -> Backend:
    """The one that is named, or the one to be chosen, for validated inputs."""
    request = request_of(inputs, platform or jax.default_backend())
    return BACKENDS[announce(request)] if backend == AUTOSELECTED else demand(backend, request)


def fastest_backend(request: AttentionRequest) -> str:
    """The fastest back end for the platform that supports the request; dot_product supports all."""
    names = FASTEST_FIRST.get(request.platform, ANYWHERE)
    return next(name for name in names if BACKENDS[name].supports(request) is None)


@functools.cache  # once for each distinct request, however many layers make it
def announce(request: AttentionRequest) -> str:
    chosen = fastest_backend(request)
    message = f"attention: {chosen} on {request.platform} for {request.describe()}"
    for name in FASTEST_FIRST.get(request.platform, ANYWHERE):
        if name == chosen:
            break
        message += f"; not {name}: {BACKENDS[name].supports(request)}"
    LOGGER.info(message)
    return chosen


def demand(name: str, request: AttentionRequest) -> Backend:
    """The named back end, or an error that says what it cannot do and what to use."""
    if name not in BACKENDS:
        raise ConfigError(
            f"There is no attention back end {name}; use {AUTOSELECTED}, {', '.join(BACKENDS)}."
        )
    reason = BACKENDS[name].supports(request)
    if reason is not None:
        raise ConfigError(
            f"Attention back end {name} cannot do this: {reason}; use {fastest_backend(request)} or {AUTOSELECTED}."
        )
    return BACKENDS[name]


def request_of(inputs: AttentionInputs, platform: str) -> AttentionRequest:
    return AttentionRequest(
        platform=platform,
        dtype=inputs.q.dtype.name,
        q_length=inputs.q.shape[1],
        k_length=inputs.k.shape[1],
        q_heads=inputs.q.shape[2],
        k_heads=inputs.k.shape[2],
        head_dim=inputs.q.shape[3],
        v_head_dim=inputs.v.shape[3],
        mask=inputs.mask,
        has_segments=inputs.q_segments is not None,
        soft_cap=inputs.soft_cap,
        has_sinks=inputs.sinks is not None,
        has_selection=inputs.selected is not None,
        custom_positions=inputs.custom_positions,
        capability=gpu_capability() if platform == "gpu" else "",
    )


def try_backends() -> Iterator[tuple[str, str]]:
    """(name, what happened) for each back end on a small causal problem whose answer is known.

    Equal keys weigh every visible value the same, so with value t at token t, query i must give the
    mean of 0..i.
    """
    length = 128
    keys = jnp.ones((1, length, 2, 128), jnp.bfloat16)
    token = np.arange(length, dtype=np.float32)
    values = jnp.broadcast_to(jnp.asarray(token, jnp.bfloat16)[None, :, None, None], keys.shape)
    for backend in BACKENDS.values():
        if backend.platform not in (None, jax.default_backend()):
            yield backend.name, f"not here: it needs a {str(backend.platform).upper()}"
            continue
        try:
            output = attend(
                keys, keys, values, backend=backend.name, mask=AttentionMask(), scale=0.1
            )
            wrong = np.abs(np.asarray(output, np.float32) - token[:, None, None] / 2).max()
            yield (
                backend.name,
                "works" if wrong < 1 else f"fails: its output is wrong by {wrong:.3g}",
            )
        except Exception as error:  # any failure of a trial is the finding
            yield backend.name, f"fails: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
