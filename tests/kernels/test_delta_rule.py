"""The gated delta rule and its convolution: against the paper's recurrence in numpy, transformers
and torch.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from maxtext.kernels.delta_rule import (
    causal_convolution,
    causal_convolution_step,
    gated_delta_rule,
    gated_delta_step,
    recurrent_gated_delta_rule,
    unit_lower_inverse,
)

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 8, 6
TOLERANCE = dict(rtol=2e-5, atol=2e-5)
NAMES = ("q", "k", "v", "log_decay", "beta", "state")
jit = jax.jit
chunked = jit(gated_delta_rule, static_argnames="chunk")
recurrent = jit(recurrent_gated_delta_rule)
convolution = jit(causal_convolution)
convolution_step = jit(causal_convolution_step)


def problem(length, strength=0.3, seed=0):
    """q, k (of length 1), v, log_decay, beta, and a state."""
    draw = np.random.default_rng(seed)
    q, k = draw.normal(size=(2, BATCH, length, HEADS, KEY_DIM))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = draw.normal(size=(BATCH, length, HEADS, VALUE_DIM))
    log_decay = -strength * draw.exponential(size=(BATCH, length, HEADS))
    beta = draw.uniform(size=(BATCH, length, HEADS))
    state = draw.normal(size=(BATCH, HEADS, KEY_DIM, VALUE_DIM))
    return tuple(array.astype(np.float32) for array in (q, k, v, log_decay, beta, state))


def paper(q, k, v, log_decay, beta, state):
    """S_t = S_{t-1} α_t (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ and o_t = S_t q_t, with S [Dv, Dk], in
    float64.
    """
    out = np.zeros(v.shape)
    final = np.zeros(state.shape)
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            memory = state[row, head].T.astype(np.float64)
            for t in range(v.shape[1]):
                key, step = k[row, t, head].astype(np.float64), float(beta[row, t, head])
                forget = np.exp(float(log_decay[row, t, head])) * (
                    np.eye(key.size) - step * np.outer(key, key)
                )
                memory = memory @ forget + step * np.outer(v[row, t, head], key)
                out[row, t, head] = memory @ q[row, t, head] / np.sqrt(key.size)
            final[row, head] = memory.T
    return out, final


@pytest.mark.parametrize(
    ("length", "chunk"), [(3, 4), (3, 64), (37, 4), (37, 16), (70, 64), (32, 16)]
)
def test_matches_the_recurrence_of_the_paper(length, chunk):
    *inputs, state = problem(length)
    expected = paper(*inputs, state)
    for actual in (
        chunked(*inputs, chunk=chunk, initial_state=state),
        recurrent(*inputs, initial_state=state),
    ):
        np.testing.assert_allclose(actual[0], expected[0], **TOLERANCE)
        np.testing.assert_allclose(actual[1], expected[1], **TOLERANCE)
    empty, _ = paper(*inputs, np.zeros_like(state))
    np.testing.assert_allclose(chunked(*inputs, chunk=chunk)[0], empty, **TOLERANCE)
    np.testing.assert_allclose(recurrent(*inputs)[0], empty, **TOLERANCE)


@pytest.mark.parametrize("chunk", [5, 17, 35])
def test_chunks_of_odd_size(chunk):
    *inputs, state = problem(40)
    expected = paper(*inputs, state)
    actual = chunked(*inputs, chunk=chunk, initial_state=state)
    for array, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(array, right, **TOLERANCE)


@pytest.mark.parametrize("initial", [False, True], ids=["empty", "state"])
def test_matches_transformers(initial):
    *inputs, state = problem(75)
    tensors = [torch.tensor(array) for array in inputs]
    start = torch.tensor(state) if initial else None
    actual = chunked(*inputs, chunk=16, initial_state=state if initial else None)
    for function in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        expected = function(*tensors, initial_state=start, output_final_state=True)
        np.testing.assert_allclose(actual[0], expected[0], **TOLERANCE)
        np.testing.assert_allclose(actual[1], expected[1], **TOLERANCE)


# The strongest decays, e^-60 and less, clear the state within a token.
@pytest.mark.parametrize("strength", [0.05, 3.0, 60.0], ids=["weak", "strong", "total"])
def test_gradients_match_the_recurrence_and_torch(strength):
    *inputs, state = problem(29, strength)
    weights = problem(29, seed=1)

    def total(function, q, k, v, log_decay, beta, state):
        out, final = function(q, k, v, log_decay, beta, initial_state=state)
        return jnp.sum(out * weights[2]) + jnp.sum(final * weights[5])

    def gradients(function):
        return jit(jax.grad(partial(total, function), argnums=range(6)))(*inputs, state)

    expected = gradients(recurrent_gated_delta_rule)
    for chunk in (4, 16, 64):
        actual = gradients(partial(gated_delta_rule, chunk=chunk))
        for name, array, right in zip(NAMES, actual, expected, strict=True):
            assert np.isfinite(array).all(), name
            np.testing.assert_allclose(array, right, rtol=1e-4, atol=3e-5, err_msg=name)

    tensors = [torch.tensor(array, requires_grad=True) for array in (*inputs, state)]
    out, final = torch_recurrent_gated_delta_rule(
        *tensors[:5], initial_state=tensors[5], output_final_state=True
    )
    ((out * torch.tensor(weights[2])).sum() + (final * torch.tensor(weights[5])).sum()).backward()
    for name, array, tensor in zip(NAMES, expected, tensors, strict=True):
        np.testing.assert_allclose(array, tensor.grad, rtol=1e-4, atol=3e-5, err_msg=name)


def test_log_decay_of_minus_infinity_clears_the_state():
    """And has a finite gradient."""
    *inputs, state = problem(20)
    inputs[3][:, 11] = -np.inf
    late = [array[:, 11:] for array in inputs]
    late[3] = np.where(np.isinf(late[3]), 0, late[3])
    expected, final = paper(*late, np.zeros_like(state))
    out, actual_final = chunked(*inputs, chunk=8, initial_state=state)
    np.testing.assert_allclose(out[:, 11:], expected, **TOLERANCE)
    np.testing.assert_allclose(actual_final, final, **TOLERANCE)

    def total(log_decay):
        return jnp.sum(gated_delta_rule(*inputs[:3], log_decay, inputs[4], chunk=8)[0] ** 2)

    gradient = jit(jax.grad(total))(inputs[3])
    assert np.isfinite(gradient).all()


def test_equal_keys_are_numerically_stable():
    """The worst case of the linear system of a chunk: its inverse is small, powers of its matrix
    are not.
    """
    *inputs, state = problem(128, strength=0.0)
    inputs[1] = np.broadcast_to(inputs[1][:, :1], inputs[1].shape)
    inputs[4] = np.ones_like(inputs[4])
    actual = chunked(*inputs, chunk=128, initial_state=state)
    for array, right in zip(actual, paper(*inputs, state), strict=True):
        np.testing.assert_allclose(array, right, **TOLERANCE)


@pytest.mark.parametrize("size", [1, 5, 16, 17, 38, 64])
def test_unit_lower_inverse_and_its_jvp(size):
    matrix = (
        np.tril(np.random.default_rng(0).normal(size=(2, 3, size, size)), -1).astype(np.float32)
        / size**0.5
    )
    inverse, change = jax.jvp(jit(unit_lower_inverse), (matrix,), (np.ones_like(matrix),))
    exact = np.linalg.inv(np.eye(size) + matrix)
    np.testing.assert_allclose(inverse, exact, rtol=1e-4, atol=1e-4)
    step = 1e-4 * np.tril(np.ones((size, size)), -1)
    differences = (
        np.linalg.inv(np.eye(size) + matrix + step) - np.linalg.inv(np.eye(size) + matrix - step)
    ) / 2e-4
    np.testing.assert_allclose(
        change, differences, rtol=1e-3, atol=1e-3 * max(1.0, np.abs(differences).max())
    )


SEGMENTS = np.array(
    [[1] * 5 + [2] * 1 + [3] * 14 + [0] * 3, [0] * 2 + [7] * 9 + [0] * 1 + [4] * 11], np.int32
)


def documents():
    """(row, first, end) of each document."""
    return [(0, 0, 5), (0, 5, 6), (0, 6, 20), (1, 2, 11), (1, 12, 23)]


@pytest.mark.parametrize("chunk", [4, 16, 64, None], ids=["4", "16", "64", "recurrent"])
def test_packed_documents_match_separate_rows(chunk):
    *inputs, state = problem(SEGMENTS.shape[1])
    function = partial(chunked, chunk=chunk) if chunk else recurrent
    out, final = function(*inputs, segments=SEGMENTS, initial_state=state)
    assert (np.asarray(out)[SEGMENTS == 0] == 0).all()
    for row, first, end in documents():
        alone = [array[row : row + 1, first:end] for array in inputs]
        # The initial state belongs to the row's first document.
        begins = state[row : row + 1] * (first in (0, 2))
        expected, last = paper(*alone, begins)
        np.testing.assert_allclose(out[row, first:end], expected[0], **TOLERANCE)
        if end in (20, 23):
            np.testing.assert_allclose(final[row], last[0], **TOLERANCE)


@pytest.mark.slow
def test_packed_documents_gradients():
    """They match the recurrence, and do not flow between documents or from padding."""
    *inputs, _ = problem(SEGMENTS.shape[1], strength=5.0)
    weights = problem(SEGMENTS.shape[1], seed=1)[2]

    def gradients(function, chosen):
        def total(*inputs):
            return jnp.sum(
                jnp.where(
                    chosen[..., None, None], function(*inputs, segments=SEGMENTS)[0] * weights, 0
                )
            )

        return jit(jax.grad(total, argnums=range(5)))(*inputs)

    everything = np.ones_like(SEGMENTS, bool)
    expected = gradients(recurrent_gated_delta_rule, everything)
    actual = gradients(partial(gated_delta_rule, chunk=8), everything)
    for name, array, right in zip(NAMES, actual, expected, strict=False):
        np.testing.assert_allclose(array, right, rtol=1e-4, atol=3e-5, err_msg=name)
        assert (np.asarray(array)[SEGMENTS == 0] == 0).all(), name
    third = gradients(partial(gated_delta_rule, chunk=8), SEGMENTS == 3)
    for name, array in zip(NAMES, third, strict=False):
        # Decays are differences of sums over the chunk: terms of their gradient cancel but for
        # rounding errors.
        assert np.abs(np.asarray(array)[SEGMENTS != 3]).max() <= (
            1e-6 if name == "log_decay" else 0
        ), name
        assert (np.asarray(array)[SEGMENTS == 3] != 0).any(), name


def test_step_continues_a_sequence():
    *inputs, state = problem(21)
    expected, final = paper(*inputs, state)
    _, state = chunked(*(array[:, :18] for array in inputs), chunk=8, initial_state=state)
    for t in (18, 19, 20):
        out, state = gated_delta_step(*(array[:, t] for array in inputs), state)
        np.testing.assert_allclose(out, expected[:, t], **TOLERANCE)
    np.testing.assert_allclose(state, final, **TOLERANCE)


def test_bfloat16_computes_in_float32():
    """Only inputs and outputs are rounded to bfloat16."""
    *inputs, state = problem(40)
    rounded = [jnp.asarray(array, jnp.bfloat16) for array in inputs]
    out, final = chunked(*rounded, chunk=16, initial_state=state)
    assert (out.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)
    expected, last = paper(*(np.asarray(array, np.float32) for array in rounded), state)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(final, last, **TOLERANCE)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution_matches_torch(width):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(BATCH, 10, 5)).astype(np.float32)
    weight = draw.normal(size=(width, 5)).astype(np.float32)
    expected = torch.nn.functional.conv1d(
        torch.tensor(x).mT, torch.tensor(weight).T[:, None], padding=width - 1, groups=5
    )[..., :10].mT
    actual, state = convolution(x, weight)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state, x[:, 11 - width :])

    # In two parts, then token by token; channels may be of several dimensions.
    deep, deep_weight = x.reshape(BATCH, 10, 5, 1), weight.reshape(width, 5, 1)
    first, state = convolution(deep[:, :2], deep_weight)
    second, state = convolution(deep[:, 2:7], deep_weight, state=state)
    parts = [first, second]
    for t in (7, 8, 9):
        y, state = convolution_step(deep[:, t], deep_weight, state)
        parts.append(y[:, None])
    np.testing.assert_allclose(
        jnp.concatenate(parts, axis=1)[..., 0], expected, rtol=1e-5, atol=1e-5
    )


def test_convolution_of_packed_documents():
    draw = np.random.default_rng(0)
    length = SEGMENTS.shape[1]
    x, weight = draw.normal(size=(BATCH, length, 5)), draw.normal(size=(4, 5))
    start = draw.normal(size=(BATCH, 3, 5))
    y, state = convolution(*map(jnp.float32, (x, weight)), SEGMENTS, jnp.float32(start))
    for row, first, end in documents():
        history = np.concatenate(
            [start[row] if first == 0 else np.zeros((3, 5)), x[row, first:end]]
        )
        expected = [(history[t : t + 4] * weight).sum(0) for t in range(end - first)]
        np.testing.assert_allclose(y[row, first:end], expected, rtol=1e-5, atol=1e-5)
        if end in (20, 23):
            np.testing.assert_allclose(state[row], history[-3:], rtol=1e-6)

    # A last document shorter than the convolution leaves zeros before it; a row of padding leaves
    # the state as it was.
    segments = np.array([[1] * 4 + [2] + [0], [0] * 6])
    _, state = convolution(jnp.float32(x[:, :6]), jnp.float32(weight), segments, jnp.float32(start))
    np.testing.assert_allclose(state[0], np.stack([np.zeros(5), np.zeros(5), x[0, 4]]), rtol=1e-6)
    np.testing.assert_allclose(state[1], start[1], rtol=1e-6)
