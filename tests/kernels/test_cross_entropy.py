"""Cross-entropy against torch, in tiles against whole, and that tiles keep the logits from
existing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxtext.kernels.cross_entropy import cross_entropy, tiled_cross_entropy
from maxtext.kernels.triton import cross_entropy as cross_entropy_rows
from tests.compiling import FAST_COMPILE

BATCH, LENGTH, SIZE, VOCABULARY = 3, 12, 8, 37


def problem():
    draw = np.random.default_rng(0)
    hidden = draw.normal(size=(BATCH, LENGTH, SIZE)).astype(np.float32)
    head = draw.normal(size=(SIZE, VOCABULARY)).astype(np.float32)
    weights = draw.normal(size=(2, BATCH, LENGTH)).astype(
        np.float32
    )  # of the losses and of the partition sums
    return hidden, head, draw.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32), weights


def in_torch():
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
def test_torch(tiles):
    hidden, head, targets, weights = problem()

    def total(hidden, head):
        losses, partition = tiled_cross_entropy(
            lambda x: x @ head, hidden, jnp.asarray(targets), tiles
        )
        return jnp.vdot(losses, weights[0]) + jnp.vdot(partition**2, weights[1]), (
            losses,
            partition,
        )

    evaluate = jax.jit(
        jax.value_and_grad(total, argnums=(0, 1), has_aux=True), compiler_options=FAST_COMPILE
    )
    (_, values), gradients = evaluate(hidden, head)
    for ours, expected in zip([*values, *gradients], in_torch(), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-5)
    assert values[0].shape == (BATCH, LENGTH)


def test_large_logits_do_not_overflow():
    logits = jnp.asarray([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]])
    losses, partition = cross_entropy(logits, jnp.asarray([1, 2]))
    np.testing.assert_allclose(
        losses, [6e4, np.log(3)], rtol=1e-6, atol=2e-3
    )  # neighbours of 3e4 are 2e-3 apart
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


def test_tiles_keep_the_logits_from_existing():
    """The compiled gradient of B S V = 4 · 64 · 8192 tokens times words needs 8.4 MB for each copy
    of the logits.
    """
    batch, length, size, vocabulary = 4, 64, 16, 8192
    logits = 4 * batch * length * vocabulary

    def total(tiles, hidden, head, targets):
        return jnp.sum(tiled_cross_entropy(lambda x: x @ head, hidden, targets, tiles)[0])

    def temporary(tiles):
        arguments = (
            jax.ShapeDtypeStruct((batch, length, size), jnp.float32),
            jax.ShapeDtypeStruct((size, vocabulary), jnp.float32),
            jax.ShapeDtypeStruct((batch, length), jnp.int32),
        )
        compiled = (
            jax.jit(jax.grad(partial(total, tiles), argnums=(0, 1))).lower(*arguments).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(1) > logits
    assert temporary(8) < logits / 2
    # Beside the logits of a tile, the running gradient of the head is there, and its next value.
    assert temporary(32) < logits / 4


ON_GPU = jax.default_backend() == "gpu"


@pytest.fixture
def kernels(monkeypatch):
    """As on a GPU, and where there is none, interpreted."""
    for name in ("log_sums", "logits_backward"):
        monkeypatch.setattr(
            cross_entropy_rows,
            name,
            partial(getattr(cross_entropy_rows, name), interpret=not ON_GPU),
        )
    return "gpu"


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(384, "float32"), (384, "bfloat16"), (8192 + 256, "float32")]
)
def test_kernels_give_the_same(kernels, vocabulary, dtype):
    """Also for rows of several parts, some of them large."""
    random = np.random.default_rng(1)
    logits = jnp.asarray(random.normal(size=(2, 64, vocabulary)) * 3, dtype).at[0, 5].mul(1000)
    targets = jnp.asarray(random.integers(0, vocabulary, (2, 64)))
    of_both = tuple(jnp.asarray(random.normal(size=(2, 64)), jnp.float32) for _ in range(2))

    @partial(jax.jit, static_argnums=1, compiler_options={} if ON_GPU else FAST_COMPILE)
    def both(logits, platform):
        values, back = jax.vjp(lambda logits: cross_entropy(logits, targets, platform), logits)
        return *values, *back(of_both)

    found, expected = both(logits, kernels), both(logits, None)
    assert found[2].dtype == logits.dtype
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(each, np.float32) for each in (ours, theirs)), rtol=2e-3, atol=1e-5
        )


def test_logits_that_are_no_numbers_have_no_loss(kernels):
    logits = jnp.zeros((128, 128)).at[3, 7].set(np.nan).at[5, 0].set(np.inf)
    losses, _ = cross_entropy(logits, jnp.zeros(128, jnp.int32), kernels)
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [3, 5]


@pytest.mark.parametrize("target", [-1, -100, 128])
def test_a_target_that_is_none_has_no_part(kernels, target):
    logits, targets = (
        jnp.asarray(np.random.default_rng(0).normal(size=(128, 128))),
        jnp.full(128, target),
    )
    for ours, theirs in zip(
        cross_entropy(logits, targets, kernels), cross_entropy(logits, targets), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("shape", [(128, 200), (100, 256), (2**20, 2**11)])
def test_what_kernels_do_not_support(shape):
    assert not cross_entropy_rows.supports(*shape, "gpu")
    assert cross_entropy_rows.supports(128, 32000, "gpu")


@pytest.mark.parametrize("vocabulary", [32000, 128256, 151936])
def test_kernels_can_be_lowered_for_gpus(vocabulary):
    logits, targets = (
        jax.ShapeDtypeStruct((256, vocabulary), "bfloat16"),
        jax.ShapeDtypeStruct((256,), "int32"),
    )

    def program(logits, targets):
        (losses, partition), back = jax.vjp(
            lambda logits: cross_entropy(logits, targets, "gpu"), logits
        )
        return back((losses, partition))

    text = jax.jit(program).trace(logits, targets).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 2
