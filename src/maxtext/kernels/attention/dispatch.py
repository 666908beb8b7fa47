"""The choice of the attention back end: `attend` runs the named one, or the fastest, which it logs
once.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head dim, Dv head
dim of values.

A back end is two functions: `unsupported_reason(request)` returns None or a reason, `run(inputs)`
the output. A named back end that does not support the request raises ConfigError: nothing falls
back silently.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.kernels.attention import cudnn, dot_product, flash
from maxtext.kernels.attention.request import (
    AttentionInputs,
    AttentionMask,
    AttentionRequest,
    BlockSizes,
    validate_inputs,
)


@dataclass(frozen=True)
class Backend:
    name: str
    unsupported_reason: Callable[[AttentionRequest], str | None]
    run: Callable[[AttentionInputs], Array]
    platform: str | None = None  # the only platform that it runs on
    opaque: bool = False  # the compiler cannot partition it over devices


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("dot_product", dot_product.unsupported_reason, dot_product.run),
        Backend("flash", flash.unsupported_reason, flash.run, platform="tpu", opaque=True),
        Backend("cudnn_flash_jax", cudnn.unsupported_reason, cudnn.run, platform="gpu"),
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

    Args:
      q, k, v: [B, S, H, D], [B, T, K, D], [B, T, K, Dv] of the same dtype; query head h uses
        key/value head h // (H / K).
      backend: a name in BACKENDS, or "autoselected".
      mask: which positions see which.
      q_positions, k_positions: [B, S], [B, T], compared by `mask`; None is the index. Packed rows
        need none for causal or windowed attention (differences within a segment are the same), and
        only dot_product supports them.
      q_segments, k_segments: [B, S], [B, T]; tokens see only their own segment. Segment 0 is
        padding: it sees no key, and its output is 0. k_segments defaults to q_segments.
      max_segments: upper bound on the runs of equal q_segments in a row, padding included; 0:
        unknown. cuDNN needs it to be fast with segments, and returns NaN for rows that have more.
      soft_cap: logits become cap * tanh(logits / cap), after the scale and before the mask.
      sinks: [H], a learned logit in the denominator of each head's softmax.
      selected: [B, 1 or H, S, T], True for keys that a query may see if mask and segments allow it.
      float32_logits, float32_product: see dot_product; the other back ends always do both.
      block_sizes: of the flash back end.
      platform: defaults to the platform of the default JAX backend.
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
    """`attend` for an AttentionInputs."""
    inputs = validate_inputs(inputs)
    return select_backend(inputs, backend, platform).run(inputs)


def select_backend(inputs: AttentionInputs, backend: str, platform: str | None = None) -> Backend:
    """The named back end, or the fastest one, for validated inputs."""
    request = AttentionRequest.from_inputs(inputs, platform or jax.default_backend())
    return BACKENDS[autoselect(request)] if backend == AUTOSELECTED else require(backend, request)


def fastest_backend(request: AttentionRequest) -> str:
    """The fastest back end of the platform that supports the request; dot_product supports all."""
    names = FASTEST_FIRST.get(request.platform, ANYWHERE)
    return next(name for name in names if BACKENDS[name].unsupported_reason(request) is None)


@functools.cache  # logs once for each distinct request, however many layers make it
def autoselect(request: AttentionRequest) -> str:
    """`fastest_backend`, logged with the reasons against faster ones."""
    chosen = fastest_backend(request)
    message = f"attention: {chosen} on {request.platform} for {request.describe()}"
    for name in FASTEST_FIRST.get(request.platform, ANYWHERE):
        if name == chosen:
            break
        message += f"; not {name}: {BACKENDS[name].unsupported_reason(request)}"
    LOGGER.info(message)
    return chosen


def require(name: str, request: AttentionRequest) -> Backend:
    """The named back end; raises ConfigError with the reason and an alternative if it does not
    support the request."""
    if name not in BACKENDS:
        raise ConfigError(
            f"There is no attention back end {name}; use {AUTOSELECTED}, {', '.join(BACKENDS)}."
        )
    reason = BACKENDS[name].unsupported_reason(request)
    if reason is not None:
        raise ConfigError(
            f"Attention back end {name} cannot do this: {reason}; "
            f"use {fastest_backend(request)} or {AUTOSELECTED}."
        )
    return BACKENDS[name]


def try_backends() -> Iterator[tuple[str, str]]:
    """(name, result) of each back end on a small causal problem with a known solution.

    With equal keys all visible values have the same weight, so with value t at token t, the output
    of query i is the mean of 0..i.
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
            error = np.abs(np.asarray(output, np.float32) - token[:, None, None] / 2).max()
            result = "works" if error < 1 else f"fails: its output is wrong by {error:.3g}"
            yield backend.name, result
        except Exception as failure:  # any failure is the result
            first_line = str(failure).splitlines()[0]
            yield backend.name, f"fails: {type(failure).__name__}: {first_line[:120]}"
