"""cudnn_flash_jax against dot_product on an NVIDIA GPU, forward and gradients, in bfloat16. Skipped
without one.

Shapes: B batch, S query length, H query heads, K key/value heads, D head size, Dv value size.
dot_product computes in float32 from the same bfloat16 inputs, so that the distance is cuDNN's
alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.attention import BACKENDS, AttentionMask, attend, try_backends

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

LENGTH = 256
PADDED = np.array([[1] * 100 + [2] * 130 + [0] * 26, [3] * 256], np.int32)
CASES = {
    "causal": {"mask": AttentionMask()},
    "all to all": {"mask": AttentionMask(causal=False)},
    "window of 1": {"mask": AttentionMask(window=1)},
    "window of 2": {"mask": AttentionMask(window=2)},
    "window of 100": {"mask": AttentionMask(window=100)},
    "chunk": {"mask": AttentionMask(chunk=64)},
    "segments": {"mask": AttentionMask(), "q_segments": PADDED},
    "segments of all to all": {"mask": AttentionMask(causal=False), "q_segments": PADDED},
    "segments in a window": {"mask": AttentionMask(window=100), "q_segments": PADDED},
    "segments in chunks": {"mask": AttentionMask(chunk=64), "q_segments": PADDED},
    "packed": {"mask": AttentionMask(), "q_segments": PADDED, "max_segments": 3},
    "packed, with room": {"mask": AttentionMask(), "q_segments": PADDED, "max_segments": 8},
    "packed all to all": {
        "mask": AttentionMask(causal=False),
        "q_segments": PADDED,
        "max_segments": 3,
    },
    "packed in a window": {
        "mask": AttentionMask(window=100),
        "q_segments": PADDED,
        "max_segments": 3,
    },
    "packed in chunks": {
        "mask": AttentionMask(chunk=128),
        "q_segments": PADDED,
        "max_segments": 3,
    },
    "own segments of keys": {
        "mask": AttentionMask(),
        "q_segments": PADDED,
        "k_segments": PADDED[::-1].copy(),
    },
}


def draw(q_heads, k_heads, head_dim, v_head_dim, dtype=jnp.bfloat16):
    normal = np.random.default_rng(0).normal
    shapes = (
        (2, LENGTH, q_heads, head_dim), (2, LENGTH, k_heads, head_dim),
        (2, LENGTH, k_heads, v_head_dim), (2, LENGTH, q_heads, v_head_dim),
    )  # fmt: skip
    return [jnp.asarray(normal(size=shape), dtype) for shape in shapes]


def compute(backend, arrays, **options):
    """Output and gradients of q, k and v, as float64."""
    *arrays, gradient = arrays
    options = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }

    @jax.jit
    def both(q, k, v, gradient):
        output, pull = jax.vjp(
            lambda q, k, v: attend(q, k, v, backend=backend, scale=0.1, **options), q, k, v
        )
        return output, *pull(gradient)

    return [np.asarray(array, np.float64) for array in both(*arrays, gradient)]


def compare(arrays, **options):
    actual = compute("cudnn_flash_jax", arrays, **options)
    with jax.default_matmul_precision("highest"):
        expected = compute(
            "dot_product", [array.astype(jnp.float32) for array in arrays], **options
        )
    for name, got, want in zip(("output", "dq", "dk", "dv"), actual, expected, strict=True):
        assert np.isfinite(got).all(), name
        # bfloat16 keeps 8 bits: an element may be off by that share of its size and of a typical
        # element's.
        np.testing.assert_allclose(
            got, want, rtol=2e-2, atol=2e-2 * max(1.0, want.std()), err_msg=name
        )
        assert np.abs(got - want).mean() < 1e-2 * (want.std() + 1e-3), name
    return actual


@pytest.mark.parametrize("case", CASES)
def test_cudnn_matches_dot_product(case):
    compare(draw(4, 2, 64, 64), **CASES[case])


@pytest.mark.parametrize(
    "heads",
    [
        (4, 4, 128, 128),
        (8, 1, 64, 64),
        (4, 2, 256, 256),
        (4, 4, 192, 128),
        (4, 4, 64, 128),
        (4, 4, 72, 72),
    ],
)
def test_heads_and_sizes(heads):
    compare(draw(*heads), mask=AttentionMask())


def test_float16():
    compare(draw(4, 2, 64, 64, jnp.float16), mask=AttentionMask(window=100))


def test_padding_gives_zero_and_no_gradient():
    output, d_q, d_k, d_v = compare(draw(4, 2, 64, 64), mask=AttentionMask(), q_segments=PADDED)
    for array in (output, d_q, d_k, d_v):
        assert not array[PADDED == 0].any()


def test_packed_rows_of_more_segments_than_said_are_not_numbers():
    output, *_ = compute(
        "cudnn_flash_jax",
        draw(4, 2, 64, 64),
        mask=AttentionMask(),
        q_segments=PADDED,
        max_segments=2,
    )
    assert np.isnan(output[0, PADDED[0] != 0]).all()
    assert np.isfinite(output[1]).all()


def test_packed_with_heads_of_two_sizes():
    compare(draw(4, 4, 192, 128), mask=AttentionMask(), q_segments=PADDED, max_segments=4)


def test_autoselected_takes_cudnn_here():
    assert dict(try_backends())["cudnn_flash_jax"] == "works"
    arrays = draw(4, 2, 64, 64)
    taken = jax.jit(
        lambda q, k, v: attend(q, k, v, backend="autoselected", mask=AttentionMask(), scale=0.1)
    ).lower(*arrays[:3])
    assert "cudnn" in taken.as_text()
    assert BACKENDS["cudnn_flash_jax"].platform == "gpu"
