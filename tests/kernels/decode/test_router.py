"""The selection of experts by one kernel against numpy in float64; interpreted unless there is a
GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode.router import select_experts

GPU = jax.default_backend() == "gpu"


def expected_selection(logits, topk, score, bias=None, normalise=False, scaling=1.0):
    if score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = exponentials / exponentials.sum(axis=-1, keepdims=True)
    values = logits if bias is None else scores + bias
    indices = np.argsort(-values, axis=-1, kind="stable")[:, :topk]
    weights = np.take_along_axis(scores, indices, axis=-1)
    if normalise or score == "softmax_of_topk":
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return indices, weights * scaling


@pytest.mark.parametrize(
    ("experts", "topk", "score", "options"),
    [
        (128, 8, "softmax", {"normalise": True}),
        (6, 3, "softmax", {"scaling": 2.5}),
        (32, 4, "softmax_of_topk", {}),
        (40, 6, "sigmoid", {"normalise": True, "scaling": 1.5, "bias": True}),
        (16, 1, "sigmoid", {}),
    ],
)
def test_select_experts(experts, topk, score, options):
    random = np.random.default_rng(experts)
    logits = random.normal(size=(5, experts)).astype(np.float32) * 3
    bias = random.normal(size=experts).astype(np.float32) if options.pop("bias", False) else None
    indices, weights = select_experts(
        jnp.asarray(logits),
        topk,
        score=score,
        bias=None if bias is None else jnp.asarray(bias),
        interpret=not GPU,
        **options,
    )
    expected = expected_selection(logits.astype(np.float64), topk, score, bias, **options)
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5)


def test_the_first_of_equal_logits_is_selected():
    indices, _ = select_experts(
        jnp.asarray([[1.0, 3.0, 3.0, 1.0, 3.0]]), 4, score="softmax", interpret=not GPU
    )
    np.testing.assert_array_equal(indices, [[1, 2, 4, 0]])


def test_weights_of_nan_logits_are_nan():
    _, weights = select_experts(
        jnp.asarray([[1.0, jnp.nan, 3.0, 1.0]]), 2, score="softmax", interpret=not GPU
    )
    assert np.isnan(weights).all()


def test_lowers_for_gpus():
    def run(logits, bias):
        return select_experts(logits, 6, score="sigmoid", bias=bias, normalise=True)

    arguments = jax.ShapeDtypeStruct((3, 160), "float32"), jax.ShapeDtypeStruct((160,), "float32")
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "select_experts" in text
