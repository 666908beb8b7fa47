"""The gated delta rule (Yang et al. 2024, Gated Delta Networks) and the short causal convolution
before it.

Each head has a state matrix S [Dk, Dv] that maps keys to values. A token decays it, then corrects
the value that it returns for the token's key, and queries it; with decay a = exp(log_decay), 0 < a
<= 1, and step β in [0, 1]:

    S_t = a_t S_{t-1} + k_t u_tᵀ,   u_t = β_t (v_t - a_t S_{t-1}ᵀ k_t),   out_t = S_tᵀ q_t / √Dk

`gated_delta_step` is one step, for decoding; `recurrent_gated_delta_rule` scans over tokens;
`gated_delta_rule` computes the same in chunks, for training. All three scale queries by Dk^-½.

Documents: `segments` [B, S] numbers the documents packed in a row; each starts from a zero state
and does not see the others. Segment 0 is padding: it neither reads the state (its output is 0) nor
changes it, so the final state is that of the row's last document. `initial_state` belongs to the
row's first document.

Everything is float32 inside and in the returned state; outputs have the dtype of v (of x for the
convolution).

Shapes: B batch, S sequence, H heads (as many for keys as for values), Dk key dim, Dv value dim, C
chunk, N chunks, W convolution width.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def einsum(pattern: str, *arrays: Array) -> Array:
    """An einsum of activations in HIGH precision (TF32 on GPUs, three bfloat16 passes on TPUs), or
    in the highest if that is JAX's default."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = default in ("highest", "float32")
    return jnp.einsum(
        pattern, *arrays, precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.HIGH
    )


def exact_einsum(pattern: str, *arrays: Array) -> Array:
    """An einsum in the highest precision, for an inverse, which amplifies errors."""
    return jnp.einsum(pattern, *arrays, precision=jax.lax.Precision.HIGHEST)


MIN_LOG_DECAY = -100.0  # exp of it is 0 in float32, and sums of it stay finite
MAX_DIRECT_BLOCK = 16  # smaller blocks would take too many small matmuls


def gated_delta_step(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """One token: q, k [B, H, Dk], v [B, H, Dv], log_decay, beta [B, H], state [B, H, Dk, Dv] ->
    (out, state).
    """
    dtype = v.dtype
    q, k, v, log_decay, beta = to_float32(q, k, v, log_decay, beta)
    state = state.astype(jnp.float32) * jnp.exp(log_decay)[..., None, None]
    write = beta[..., None] * (v - einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * write[..., None, :]
    return einsum("bhkv,bhk->bhv", state, q).astype(dtype), state


def recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    initial_state: Array | None = None,
    segments: Array | None = None,
) -> tuple[Array, Array]:
    """As `gated_delta_rule`, token by token: its reference in tests, slow for long sequences."""
    state = float32_state(k, v, initial_state)
    if segments is not None:
        q, log_decay, beta = mask_padding(segments == 0, q, log_decay, beta)
        document = document_index(segments)
        begins = document != jnp.pad(document[:, :-1], ((0, 0), (1, 0)))
        log_decay = jnp.where(begins[..., None], -jnp.inf, log_decay)

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, log_decay, beta = token
        out, state = gated_delta_step(q, k, v, log_decay, beta, state)
        return state, out

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta))
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    chunk: int,
    initial_state: Array | None = None,
    segments: Array | None = None,
) -> tuple[Array, Array]:
    """q, k [B, S, H, Dk], v [B, S, H, Dv], log_decay, beta [B, S, H] -> (out [B, S, H, Dv], state
    [B, H, Dk, Dv]).

    Let S₀ be the state before a chunk, and decay(i, j) the decay between its tokens j <= i.
    Unrolling the rule,

        S_i = decay(i, start) S₀ + Σ_{j<=i} decay(i, j) k_j u_jᵀ

    so the writes u of a chunk solve (I + L) U = β V - (β decay(·, start) K) S₀, L_ij = β_i decay(i,
    j) k_i·k_j for j < i. The inverse of I + L, and with it all terms that do not depend on S₀, is
    computed for all chunks at once; a scan then carries the state through the chunks with two
    matmuls each, and the outputs are again computed for all chunks at once. The decay between
    different documents is 0.
    """
    length, dtype = q.shape[1], v.dtype
    chunk = min(chunk, length)
    state = float32_state(k, v, initial_state)
    if segments is None:
        document = jnp.zeros((1, length), jnp.int32)
    else:
        q, log_decay, beta = mask_padding(segments == 0, q, log_decay, beta)
        document = document_index(segments)
    q, k, v, log_decay, beta = to_float32(q, k, v, log_decay, beta)
    # The padding of the last chunk does not change the state: β = 0 and a decay of 1 (log 0).
    q, k, v, log_decay, beta = (
        split_chunks(x, chunk) for x in (q, k, v, log_decay, beta)
    )  # [N, B, H, C, ...]
    document = split_chunks(document[..., None], chunk, mode="edge")  # [N, B or 1, 1, C]

    # The log decay of each pair is summed separately: differences of one running sum would lose
    # precision.
    log_decay = jnp.maximum(log_decay, MIN_LOG_DECAY)
    passed = jnp.tril(jnp.broadcast_to(log_decay[..., :, None], (*log_decay.shape, chunk)), -1)
    passed = jnp.cumsum(passed, axis=-2)  # [N, B, H, C, C]: over the tokens after j up to i
    total = jnp.cumsum(log_decay, axis=-1)
    # The document that S₀ belongs to.
    before = jnp.pad(document[:-1, ..., -1:], ((1, 0), (0, 0), (0, 0), (0, 0)))
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))
    same = document[..., :, None] == document[..., None, :]
    pair_decay = masked_exp(passed, causal & same)
    start_decay = masked_exp(total, document == before)  # [N, B, H, C]
    end_decay = masked_exp(passed[..., -1, :], document == document[..., -1:])

    overlap = jnp.tril(einsum("...id,...jd->...ij", k, k) * pair_decay, -1) * beta[..., None]
    inverse = unit_lower_inverse(overlap)
    value_writes = einsum("...ij,...jv->...iv", inverse, v * beta[..., None])
    state_keys = einsum("...ij,...jk->...ik", inverse, k * (beta * start_decay)[..., None])

    def advance(state: Array, chunk_inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        value_writes, state_keys, keys, decay = chunk_inputs
        writes = value_writes - einsum("bhck,bhkv->bhcv", state_keys, state)
        new_state = decay[..., None, None] * state + einsum("bhck,bhcv->bhkv", keys, writes)
        return new_state, (state, writes)

    chunks = (value_writes, state_keys, k * end_decay[..., None], start_decay[..., -1])
    state, (states, writes) = scan_late(advance, state, chunks)
    out = einsum("nbhck,nbhkv->nbhcv", q * start_decay[..., None], states)
    out += einsum("...ij,...jv->...iv", einsum("...id,...jd->...ij", q, k) * pair_decay, writes)
    return merge_chunks(out)[:, :length].astype(dtype), state


def causal_convolution(
    x: Array, weight: Array, segments: Array | None = None, state: Array | None = None
) -> tuple[Array, Array]:
    """Depthwise y_t = Σ_w weight_w x_{t-W+1+w}: x [B, S, *channels], weight [W, *channels] -> (y,
    state).

    The state [B, W-1, *channels] holds the inputs right before x_0 (zeros if there are none); the
    returned state, the last inputs of the row's last document. A token sees only inputs of its own
    segment.
    """
    width, length = weight.shape[0], x.shape[1]
    if state is None:
        state = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype)
    history = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    weight = weight.astype(x.dtype).astype(jnp.float32)

    def widen(mask: Array) -> Array:
        return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))

    if segments is None:
        taps = [history[:, tap : tap + length] for tap in range(width)]
        state = history[:, length:]
    else:
        # The inputs before x belong to the first document.
        history_segments = jnp.pad(segments, ((0, 0), (width - 1, 0)), mode="edge")
        taps = [
            jnp.where(
                widen(history_segments[:, tap : tap + length] == segments),
                history[:, tap : tap + length],
                0,
            )
            for tap in range(width)
        ]
        # The last W-1 inputs up to the last token that is not padding; inputs of another document
        # are zero.
        end = jnp.max(jnp.where(segments != 0, jnp.arange(1, length + 1), 0), axis=1, keepdims=True)
        indices = end + jnp.arange(width - 1)
        last = jnp.take_along_axis(history_segments, end + width - 2, axis=1)
        own = jnp.take_along_axis(history_segments, indices, axis=1) == last
        state = jnp.where(widen(own), jnp.take_along_axis(history, widen(indices), axis=1), 0)
    # Accumulated in float32 and rounded once.
    y = sum(tap.astype(jnp.float32) * w for tap, w in zip(taps, weight, strict=True))
    return jnp.asarray(y).astype(x.dtype), state


def causal_convolution_step(x: Array, weight: Array, state: Array) -> tuple[Array, Array]:
    """One token: x [B, *channels], weight [W, *channels], state [B, W-1, *channels] -> (y,
    state).
    """
    y, state = causal_convolution(x[:, None], weight, state=state)
    return y[:, 0], state


@jax.custom_jvp
def unit_lower_inverse(strict: Array) -> Array:
    """(I + strict)⁻¹ for strictly lower triangular matrices [..., C, C].

    By recursion over halves, [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]: matmuls only, and
    unlike the powers of a Neumann series none of them is larger than the inverse and the matrix.
    """
    size = strict.shape[-1]
    if size <= MAX_DIRECT_BLOCK:
        return small_unit_lower_inverse(strict)
    if size % 2:
        edge = [(0, 0)] * (strict.ndim - 2) + [(0, 1)] * 2
        return unit_lower_inverse(jnp.pad(strict, edge))[..., :size, :size]
    half = size // 2
    upper, lower = unit_lower_inverse(
        jnp.stack([strict[..., :half, :half], strict[..., half:, half:]])
    )
    corner = -exact_einsum("...ij,...jk,...kl->...il", lower, strict[..., half:, :half], upper)
    return jnp.block([[upper, jnp.zeros_like(upper)], [corner, lower]])


@unit_lower_inverse.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals)
    change = jnp.tril(tangents[0], -1)
    return inverse, -exact_einsum("...ij,...jk,...kl->...il", inverse, change, inverse)


def small_unit_lower_inverse(strict: Array) -> Array:
    """The same recursion from the bottom up: `inverse` holds the inverses of the diagonal blocks of
    one size, then of twice that size.
    """
    size = strict.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=strict.dtype), strict.shape)
    block = 1
    while block < size:
        index = jnp.arange(size) // block
        pairs = (index[:, None] // 2 == index // 2) & (index[:, None] > index)
        corners = jnp.where(pairs, strict, 0)
        inverse = inverse - exact_einsum("...ij,...jk,...kl->...il", inverse, corners, inverse)
        block *= 2
    return inverse


Step = Callable[[Array, tuple[Array, ...]], tuple[Array, tuple[Array, ...]]]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def scan_late(step: Step, state: Array, xs: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    """`jax.lax.scan`, whose outputs get their memory when `xs` are there. XLA for GPUs fills those
    of all scans of a program at its start: in a prefill, the states of all chunks of all layers.
    """
    first = tuple(x[0] for x in xs)
    _, shapes = jax.eval_shape(step, state, first)
    outputs = tuple(late_zeros((len(xs[0]), *y.shape), y.dtype, xs[0]) for y in shapes)

    def run(index: Array, carry: tuple) -> tuple:
        state, outputs = carry
        x = tuple(jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in xs)
        state, new = step(state, x)
        outputs = tuple(
            jax.lax.dynamic_update_index_in_dim(old, y, index, 0)
            for old, y in zip(outputs, new, strict=True)
        )
        return state, outputs

    return jax.lax.fori_loop(0, len(xs[0]), run, (state, outputs))


@scan_late.defjvp
def _(step: Step, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(lambda state, xs: jax.lax.scan(step, state, xs), primals, tangents)


def late_zeros(shape: tuple[int, ...], dtype: DTypeLike, x: Array) -> Array:
    """Zeros that XLA cannot create before x is there."""
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), dtype), x))
    return jnp.broadcast_to(zero, shape)


def float32_state(k: Array, v: Array, initial_state: Array | None) -> Array:
    if initial_state is None:
        return late_zeros((k.shape[0], *k.shape[2:], v.shape[-1]), jnp.float32, k)
    return initial_state.astype(jnp.float32)


def to_float32(q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> tuple[Array, ...]:
    """All in float32, with scaled queries."""
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    return q * q.shape[-1] ** -0.5, k, v, log_decay, beta


def mask_padding(
    padding: Array, q: Array, log_decay: Array, beta: Array
) -> tuple[Array, Array, Array]:
    """Padding [B, S] neither reads the state, nor decays it, nor writes to it."""
    padding = padding[..., None]
    return (
        jnp.where(padding[..., None], 0, q),
        jnp.where(padding, 0, log_decay),
        jnp.where(padding, 0, beta),
    )


def document_index(segments: Array) -> Array:
    """[B, S]: the index of each token's document in its row; padding has that of the document
    before it.
    """
    positions = jnp.where(segments != 0, jnp.arange(segments.shape[1]), -1)
    previous = jnp.pad(
        jax.lax.cummax(positions, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1
    )
    differs = jnp.take_along_axis(segments, jnp.maximum(previous, 0), axis=1) != segments
    return jnp.cumsum((segments != 0) & (previous >= 0) & differs, axis=1)


def masked_exp(log_decay: Array, visible: Array) -> Array:
    """exp(log_decay) where visible, else 0. Masked before exp, so that the gradient has no 0 ·
    inf.
    """
    return jnp.exp(jnp.where(visible, log_decay, -jnp.inf))


def split_chunks(x: Array, chunk: int, mode: str = "constant") -> Array:
    """[B, S, H, ...] -> [N, B, H, C, ...], padded to a multiple of the chunk."""
    missing = -x.shape[1] % chunk
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def merge_chunks(x: Array) -> Array:
    """[N, B, H, C, D] -> [B, N C, H, D]."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])
