"""Cross-entropy against torch, tiled against untiled, and the memory of tiled logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxtext.kernels import cross_entropy as triton_cross_entropy
from maxtext.kernels.cross_entropy import cross_entropy, tiled_cross_entropy

BATCH, LENGTH, EMBED_DIM, VOCABULARY = 3, 12, 8, 37


def problem():
    draw = np.random.default_rng(0)
    hidden = draw.normal(size=(BATCH, LENGTH, EMBED_DIM)).astype(np.float32)
    head = draw.normal(size=(EMBED_DIM, VOCABULARY)).astype(np.float32)
    # Of the losses and of the partition sums.
    weights = draw.normal(size=(2, BATCH, LENGTH)).astype(np.float32)
    return hidden, head, draw.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32), weights


def torch_reference():
    """(losses, log partition sums, gradients of hidden and head), in float64."""
    hidden, head, targets, weights = problem()
    hidden, head = (
        torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (hidden, head)
    )
    logits = hidden @ head
    losses = torch.nn.functional.cross_entropy(
        logits.mT, torch.tensor(targets, dtype=torch.long), reduction="none"
    )
    partition = torch.logsumexp(logits, dim=-1)
    (losses * torch.tensor(weights[0]) + partition**2 * torch.tensor(weights[1])).sum().backward()
    return losses.detach(), partition.detach(), hidden.grad, head.grad


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 12])
def test_losses_and_gradients_match_torch(tiles):
    hidden, head, targets, weights = problem()

    def total(hidden, head):
        losses, partition = tiled_cross_entropy(
            lambda x: x @ head, hidden, jnp.asarray(targets), tiles
        )
        return jnp.vdot(losses, weights[0]) + jnp.vdot(partition**2, weights[1]), (
            losses,
            partition,
        )

    evaluate = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, values), gradients = evaluate(hidden, head)
    for actual, expected in zip([*values, *gradients], torch_reference(), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-5)
    assert values[0].shape == (BATCH, LENGTH)


def test_large_logits_do_not_overflow():
    logits = jnp.asarray([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]])
    losses, partition = cross_entropy(logits, jnp.asarray([1, 2]))
    np.testing.assert_allclose(
        losses, [6e4, np.log(3)], rtol=1e-6, atol=2e-3
    )  # float32 values near 3e4 differ by 2e-3
    np.testing.assert_allclose(partition, [3e4, -3e4 + np.log(3)], rtol=1e-6)


def test_bfloat16_logits_are_summed_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5000)), jnp.bfloat16)
    targets = np.array([0, 7, 4999, 2500])
    losses, partition = cross_entropy(logits, jnp.asarray(targets))
    assert losses.dtype == partition.dtype == jnp.float32
    exact = torch.tensor(np.asarray(logits, np.float64))
    np.testing.assert_allclose(partition, torch.logsumexp(exact, -1), rtol=1e-6)
    expected = torch.nn.functional.cross_entropy(exact, torch.tensor(targets), reduction="none")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_tiling_bounds_the_memory_of_logits():
    """Each copy of the B S V = 4 · 64 · 8192 logits takes 8.4 MB in the compiled gradient."""
    batch, length, embed_dim, vocabulary = 4, 64, 16, 8192
    logits_bytes = 4 * batch * length * vocabulary

    def total(tiles, hidden, head, targets):
        return jnp.sum(tiled_cross_entropy(lambda x: x @ head, hidden, targets, tiles)[0])

    def temporary_bytes(tiles):
        arguments = (
            jax.ShapeDtypeStruct((batch, length, embed_dim), jnp.float32),
            jax.ShapeDtypeStruct((embed_dim, vocabulary), jnp.float32),
            jax.ShapeDtypeStruct((batch, length), jnp.int32),
        )
        compiled = (
            jax.jit(jax.grad(partial(total, tiles), argnums=(0, 1))).lower(*arguments).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(1) > logits_bytes
    assert temporary_bytes(8) < logits_bytes / 2
    # Besides the logits of a tile: the accumulated gradient of the head, and its next value.
    assert temporary_bytes(32) < logits_bytes / 4


ON_GPU = jax.default_backend() == "gpu"


@pytest.fixture
def triton(monkeypatch):
    """The platform that uses Triton kernels, interpreted unless there is a GPU."""
    for name in ("log_sums", "logits_backward"):
        monkeypatch.setattr(
            triton_cross_entropy,
            name,
            partial(getattr(triton_cross_entropy, name), interpret=not ON_GPU),
        )
    return "gpu"


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(384, "float32"), (384, "bfloat16"), (8192 + 256, "float32")]
)
def test_triton_matches_xla(triton, vocabulary, dtype):
    """Also for rows of several tiles, and large logits."""
    random = np.random.default_rng(1)
    logits = jnp.asarray(random.normal(size=(2, 64, vocabulary)) * 3, dtype).at[0, 5].mul(1000)
    targets = jnp.asarray(random.integers(0, vocabulary, (2, 64)))
    cotangents = tuple(jnp.asarray(random.normal(size=(2, 64)), jnp.float32) for _ in range(2))

    @partial(jax.jit, static_argnums=1)
    def losses_and_gradient(logits, platform):
        values, vjp = jax.vjp(lambda logits: cross_entropy(logits, targets, platform), logits)
        return *values, *vjp(cotangents)

    actual, expected = losses_and_gradient(logits, triton), losses_and_gradient(logits, None)
    assert actual[2].dtype == logits.dtype
    for array, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(array, np.float32), np.asarray(right, np.float32), rtol=2e-3, atol=1e-5
        )


def test_nonfinite_logits_give_nonfinite_losses(triton):
    logits = jnp.zeros((128, 128)).at[3, 7].set(np.nan).at[5, 0].set(np.inf)
    losses, _ = cross_entropy(logits, jnp.zeros(128, jnp.int32), triton)
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [3, 5]


@pytest.mark.parametrize("target", [-1, -100, 128])
def test_targets_outside_the_vocabulary_match_xla(triton, target):
    logits, targets = (
        jnp.asarray(np.random.default_rng(0).normal(size=(128, 128))),
        jnp.full(128, target),
    )
    for actual, expected in zip(
        cross_entropy(logits, targets, triton), cross_entropy(logits, targets), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(128, 200), (100, 256), (2**20, 2**11)])
def test_unsupported_shapes(shape):
    assert not triton_cross_entropy.supports(*shape, "gpu")
    assert triton_cross_entropy.supports(128, 32000, "gpu")


@pytest.mark.parametrize("vocabulary", [32000, 128256, 151936])
def test_kernels_lower_for_gpus(vocabulary):
    logits, targets = (
        jax.ShapeDtypeStruct((256, vocabulary), "bfloat16"),
        jax.ShapeDtypeStruct((256,), "int32"),
    )

    def program(logits, targets):
        (losses, partition), vjp = jax.vjp(
            lambda logits: cross_entropy(logits, targets, "gpu"), logits
        )
        return vjp((losses, partition))

    text = jax.jit(program).trace(logits, targets).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 2
