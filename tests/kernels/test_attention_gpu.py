"""cudnn_flash_jax against dot_product on an NVIDIA GPU, forward and gradients, in bfloat16. Skipped
without one.

Shapes: B batch, S query length, H query heads, K key/value heads, D head dim, Dv head dim of
values. dot_product computes in float32 from the same bfloat16 inputs, so that the error is cuDNN's
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
    "packed, fewer than max_segments": {
        "mask": AttentionMask(),
        "q_segments": PADDED,
        "max_segments": 8,
    },
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
    "different segments of keys": {
        "mask": AttentionMask(),
        "q_segments": PADDED,
        "k_segments": PADDED[::-1].copy(),
    },
}


def draw(q_heads, k_heads, head_dim, v_head_dim, dtype=jnp.bfloat16):
    normal = np.random.default_rng(0).normal
    shapes = (
        (2, LENGTH, q_heads, head_dim),
        (2, LENGTH, k_heads, head_dim),
        (2, LENGTH, k_heads, v_head_dim),
        (2, LENGTH, q_heads, v_head_dim),
    )
    return [jnp.asarray(normal(size=shape), dtype) for shape in shapes]


def compute(backend, arrays, **options):
    """Output and gradients of q, k and v, as float64."""
    *arrays, dout = arrays
    options = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }

    @jax.jit
    def output_and_gradients(q, k, v, dout):
        output, vjp = jax.vjp(
            lambda q, k, v: attend(q, k, v, backend=backend, scale=0.1, **options), q, k, v
        )
        return output, *vjp(dout)

    return [np.asarray(array, np.float64) for array in output_and_gradients(*arrays, dout)]


def compare(arrays, **options):
    actual = compute("cudnn_flash_jax", arrays, **options)
    with jax.default_matmul_precision("highest"):
        expected = compute(
            "dot_product", [array.astype(jnp.float32) for array in arrays], **options
        )
    for name, got, want in zip(("output", "dq", "dk", "dv"), actual, expected, strict=True):
        assert np.isfinite(got).all(), name
        # bfloat16 has 8 bits of precision: the tolerance is relative to an element and to a typical
        # element.
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
def test_heads_and_head_dims(heads):
    compare(draw(*heads), mask=AttentionMask())


def test_float16():
    compare(draw(4, 2, 64, 64, jnp.float16), mask=AttentionMask(window=100))


def test_padding_gives_zero_and_no_gradient():
    output, dq, dk, dv = compare(draw(4, 2, 64, 64), mask=AttentionMask(), q_segments=PADDED)
    for array in (output, dq, dk, dv):
        assert not array[PADDED == 0].any()


def test_rows_with_more_than_max_segments_are_nan():
    output, *_ = compute(
        "cudnn_flash_jax",
        draw(4, 2, 64, 64),
        mask=AttentionMask(),
        q_segments=PADDED,
        max_segments=2,
    )
    assert np.isnan(output[0, PADDED[0] != 0]).all()
    assert np.isfinite(output[1]).all()


def test_packed_with_different_value_dim():
    compare(draw(4, 4, 192, 128), mask=AttentionMask(), q_segments=PADDED, max_segments=4)


def test_autoselected_uses_cudnn():
    assert dict(try_backends())["cudnn_flash_jax"] == "works"
    arrays = draw(4, 2, 64, 64)
    lowered = jax.jit(
        lambda q, k, v: attend(q, k, v, backend="autoselected", mask=AttentionMask(), scale=0.1)
    ).lower(*arrays[:3])
    assert "cudnn" in lowered.as_text()
    assert BACKENDS["cudnn_flash_jax"].platform == "gpu"
