"""The gated delta rule (Yang et al. 2024, Gated Delta Networks) and the short causal convolution
ahead of it.

Each head keeps a matrix S [Dk, Dv] that maps keys to values. A token fades it, then corrects what
it answers to the token's key, and reads it with the token's query; with fade a = exp(log_decay), 0
< a <= 1, and step β in [0, 1]:

    S_t = a_t S_{t-1} + k_t u_tᵀ,   u_t = β_t (v_t - a_t S_{t-1}ᵀ k_t),   out_t = S_tᵀ q_t / √Dk

`gated_delta_step` is this line, for decoding; `recurrent_gated_delta_rule` runs it token by token;
`gated_delta_rule` computes the same in chunks, for training. Queries are scaled by Dk^-½ inside all
three, when they are cast.

Documents: `segments` [B, S] numbers the documents packed in a row; each starts from an empty state
and sees nothing of the others. Segment 0 is padding: it neither reads (its output is 0) nor changes
the state, so the final state is the one of the row's last document. A state that is passed in
belongs to the row's first document.

Everything is float32 inside and in the returned state; outputs have the dtype of v (of x for the
convolution).

Shapes: B batch, S sequence, H heads (as many for keys as for values), Dk key size, Dv value size, C
chunk, N chunks, W convolution width.
"""

import jax
import jax.numpy as jnp
from jax import Array


def product(pattern: str, *arrays: Array) -> Array:
    """Near-float32 is enough for products of activations (TF32 on GPUs, three bfloat16 passes on
    TPUs), unless the highest precision is asked for."""
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    exact = asked in ("highest", "float32")
    return jnp.einsum(
        pattern, *arrays, precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.HIGH
    )


def exact_product(pattern: str, *arrays: Array) -> Array:
    """For an inverse, which multiplies its own errors."""
    return jnp.einsum(pattern, *arrays, precision=jax.lax.Precision.HIGHEST)


FADED = (
    -100.0
)  # exp of this is 0 in float32; nothing below it is told apart, and sums of it stay finite
SMALL = 16  # blocks up to this size are inverted whole: smaller products would be too many


def gated_delta_step(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """One token: q, k [B, H, Dk], v [B, H, Dv], log_decay, beta [B, H], state [B, H, Dk, Dv] ->
    (out, state).
    """
    dtype = v.dtype
    q, k, v, log_decay, beta = to_float32(q, k, v, log_decay, beta)
    state = state.astype(jnp.float32) * jnp.exp(log_decay)[..., None, None]
    write = beta[..., None] * (v - product("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * write[..., None, :]
    return product("bhkv,bhk->bhv", state, q).astype(dtype), state


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
    """As gated_delta_rule, one token after the other: the definition it is tested against, slow
    where S is long.
    """
    state = first_state(k, v, initial_state)
    if segments is not None:
        q, log_decay, beta = leave_out(segments == 0, q, log_decay, beta)
        document = count_documents(segments)
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

    Let S₀ be the state before a chunk, and fade(i, j) the decay between its tokens j <= i.
    Unrolling the rule,

        S_i = fade(i, start) S₀ + Σ_{j<=i} fade(i, j) k_j u_jᵀ

    so the writes u of a chunk solve (I + L) U = β V - (β fade(·, start) K) S₀, L_ij = β_i fade(i,
    j) k_i·k_j for j < i. The inverse of I + L, and with it all that does not depend on S₀, is
    computed for all chunks at once; a scan then carries the state through the chunks with two
    products each, and the outputs are again computed for all at once. Where documents meet, fade is
    0.
    """
    length, dtype = q.shape[1], v.dtype
    chunk = min(chunk, length)
    state = first_state(k, v, initial_state)
    if segments is None:
        document = jnp.zeros((1, length), jnp.int32)
    else:
        q, log_decay, beta = leave_out(segments == 0, q, log_decay, beta)
        document = count_documents(segments)
    q, k, v, log_decay, beta = to_float32(q, k, v, log_decay, beta)
    # What fills the last chunk is as padding: β = 0 writes nothing, a decay of 1 (log 0) keeps the
    # state.
    q, k, v, log_decay, beta = (
        split(x, chunk) for x in (q, k, v, log_decay, beta)
    )  # [N, B, H, C, ...]
    document = split(document[..., None], chunk, mode="edge")  # [N, B or 1, 1, C]

    # Each pair's decay is summed by itself: differences of one running sum would lose the digits of
    # what came before.
    log_decay = jnp.maximum(log_decay, FADED)
    passed = jnp.tril(jnp.broadcast_to(log_decay[..., :, None], (*log_decay.shape, chunk)), -1)
    passed = jnp.cumsum(passed, axis=-2)  # [N, B, H, C, C]: over the tokens after j up to i
    total = jnp.cumsum(log_decay, axis=-1)
    before = jnp.pad(
        document[:-1, ..., -1:], ((1, 0), (0, 0), (0, 0), (0, 0))
    )  # the document S₀ belongs to
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))
    same = document[..., :, None] == document[..., None, :]
    between = faded(passed, causal & same)
    from_start = faded(total, document == before)  # [N, B, H, C]
    to_end = faded(passed[..., -1, :], document == document[..., -1:])

    overlap = jnp.tril(product("...id,...jd->...ij", k, k) * between, -1) * beta[..., None]
    inverse = unit_lower_inverse(overlap)
    new = product("...ij,...jv->...iv", inverse, v * beta[..., None])
    known = product("...ij,...jk->...ik", inverse, k * (beta * from_start)[..., None])

    def advance(state: Array, part: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        new, known, keys, kept = part
        writes = new - product("bhck,bhkv->bhcv", known, state)
        after = kept[..., None, None] * state + product("bhck,bhcv->bhkv", keys, writes)
        return after, (state, writes)

    parts = (new, known, k * to_end[..., None], from_start[..., -1])
    state, (states, writes) = jax.lax.scan(advance, state, parts)
    out = product("nbhck,nbhkv->nbhcv", q * from_start[..., None], states)
    out += product("...ij,...jv->...iv", product("...id,...jd->...ij", q, k) * between, writes)
    return join(out)[:, :length].astype(dtype), state


def causal_convolution(
    x: Array, kernel: Array, segments: Array | None = None, state: Array | None = None
) -> tuple[Array, Array]:
    """y_t = Σ_w kernel_w x_{t-W+1+w}, each channel by itself: x [B, S, *channels], kernel [W,
    *channels] -> (y, state).

    The state [B, W-1, *channels] holds the inputs right before x_0 (zeros if there were none) and,
    returned, the last ones of the row's last document. A token sees only inputs of its own segment.
    """
    width, length = kernel.shape[0], x.shape[1]
    if state is None:
        state = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype)
    reach = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    kernel = kernel.astype(x.dtype).astype(jnp.float32)

    def widen(mask: Array) -> Array:
        return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))

    if segments is None:
        taps = [reach[:, tap : tap + length] for tap in range(width)]
        state = reach[:, length:]
    else:
        # What came before x belongs to the first document.
        names = jnp.pad(segments, ((0, 0), (width - 1, 0)), mode="edge")
        taps = [
            jnp.where(
                widen(names[:, tap : tap + length] == segments), reach[:, tap : tap + length], 0
            )
            for tap in range(width)
        ]
        # The last W-1 places up to the last token that is no padding; those of another document
        # count as empty.
        end = jnp.max(jnp.where(segments != 0, jnp.arange(1, length + 1), 0), axis=1, keepdims=True)
        places = end + jnp.arange(width - 1)
        last = jnp.take_along_axis(names, end + width - 2, axis=1)
        own = jnp.take_along_axis(names, places, axis=1) == last
        state = jnp.where(widen(own), jnp.take_along_axis(reach, widen(places), axis=1), 0)
    # Rounded once, as a convolution that accumulates in float32.
    y = sum(tap.astype(jnp.float32) * weight for tap, weight in zip(taps, kernel, strict=True))
    return jnp.asarray(y).astype(x.dtype), state


def causal_convolution_step(x: Array, kernel: Array, state: Array) -> tuple[Array, Array]:
    """One token: x [B, *channels], kernel [W, *channels], state [B, W-1, *channels] -> (y,
    state).
    """
    y, state = causal_convolution(x[:, None], kernel, state=state)
    return y[:, 0], state


@jax.custom_jvp
def unit_lower_inverse(strict: Array) -> Array:
    """(I + strict)⁻¹ for strictly lower triangular matrices [..., C, C].

    By halves, [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]: products only, and unlike the
    powers of a Neumann series none of them is larger than the inverse and the matrix themselves.
    """
    size = strict.shape[-1]
    if size <= SMALL:
        return small_inverse(strict)
    if size % 2:
        edge = [(0, 0)] * (strict.ndim - 2) + [(0, 1)] * 2
        return unit_lower_inverse(jnp.pad(strict, edge))[..., :size, :size]
    half = size // 2
    upper, lower = unit_lower_inverse(
        jnp.stack([strict[..., :half, :half], strict[..., half:, half:]])
    )
    corner = -exact_product("...ij,...jk,...kl->...il", lower, strict[..., half:, :half], upper)
    return jnp.block([[upper, jnp.zeros_like(upper)], [corner, lower]])


@unit_lower_inverse.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals)
    change = jnp.tril(tangents[0], -1)
    return inverse, -exact_product("...ij,...jk,...kl->...il", inverse, change, inverse)


def small_inverse(strict: Array) -> Array:
    """The same by halves from the bottom up: T inverts the blocks of one size on the diagonal, then
    of twice that.
    """
    size = strict.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=strict.dtype), strict.shape)
    block = 1
    while block < size:
        number = jnp.arange(size) // block
        pairs = (number[:, None] // 2 == number // 2) & (number[:, None] > number)
        corners = jnp.where(pairs, strict, 0)
        inverse = inverse - exact_product("...ij,...jk,...kl->...il", inverse, corners, inverse)
        block *= 2
    return inverse


def first_state(k: Array, v: Array, initial_state: Array | None) -> Array:
    if initial_state is None:
        return jnp.zeros((k.shape[0], *k.shape[2:], v.shape[-1]), jnp.float32)
    return initial_state.astype(jnp.float32)


def to_float32(q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> tuple[Array, ...]:
    """And the queries scaled."""
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    return q * q.shape[-1] ** -0.5, k, v, log_decay, beta


def leave_out(
    padding: Array, q: Array, log_decay: Array, beta: Array
) -> tuple[Array, Array, Array]:
    """Tokens of padding neither read the state, nor fade it, nor write to it; padding [B, S]."""
    padding = padding[..., None]
    return (
        jnp.where(padding[..., None], 0, q),
        jnp.where(padding, 0, log_decay),
        jnp.where(padding, 0, beta),
    )


def count_documents(segments: Array) -> Array:
    """For each token the number of documents that began after the row's first one; padding goes
    with what precedes.
    """
    places = jnp.where(segments != 0, jnp.arange(segments.shape[1]), -1)
    previous = jnp.pad(jax.lax.cummax(places, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    differs = jnp.take_along_axis(segments, jnp.maximum(previous, 0), axis=1) != segments
    return jnp.cumsum((segments != 0) & (previous >= 0) & differs, axis=1)


def faded(log_decay: Array, seen: Array) -> Array:
    """exp(log_decay) where seen, else 0. Hidden before exp, so that no infinity meets a zero in the
    gradient.
    """
    return jnp.exp(jnp.where(seen, log_decay, -jnp.inf))


def split(x: Array, chunk: int, mode: str = "constant") -> Array:
    """[B, S, H, ...] -> [N, B, H, C, ...], filled up to whole chunks."""
    missing = -x.shape[1] % chunk
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def join(x: Array) -> Array:
    """[N, B, H, C, D] -> [B, N C, H, D]."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])
