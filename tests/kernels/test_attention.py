"""Attention back ends against torch and a float64 reference, forward and gradients.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head dim, Dv head
dim of values.
"""

from dataclasses import replace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxtext.kernels.attention import AttentionInputs, AttentionMask, BlockSizes, attend, cudnn
from maxtext.kernels.attention import flash as flash_module
from maxtext.kernels.attention.flash import computed_mask, fit_block

SCALE = 0.3
# Two segments and padding in the first row, three segments in the second: [B=2, 12].
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [3] * 2 + [1] * 6 + [2] * 4], np.int32)


def problem(
    batch=2, q_length=12, k_length=None, q_heads=4, k_heads=2, head_dim=8, v_head_dim=None, seed=0
):
    """q, k, v and the dout of the output, in float64."""
    k_length, v_head_dim = k_length or q_length, v_head_dim or head_dim
    draw = np.random.default_rng(seed).normal
    q = draw(size=(batch, q_length, q_heads, head_dim))
    k = draw(size=(batch, k_length, k_heads, head_dim))
    v = draw(size=(batch, k_length, k_heads, v_head_dim))
    return q, k, v, draw(size=(batch, q_length, q_heads, v_head_dim))


def visible(mask, q_positions, k_positions, q_segments=None, k_segments=None):
    """The definition, one pair at a time: [B, S, T] from positions [B, S], [B, T]."""
    batch, q_length = q_positions.shape
    result = np.zeros((batch, q_length, k_positions.shape[1]), bool)
    for b, s, t in np.ndindex(result.shape):
        i, j = int(q_positions[b, s]), int(k_positions[b, t])
        sees = j <= i or not mask.causal
        if mask.window is not None:
            sees &= i - mask.window < j
        if mask.chunk is not None:
            sees &= np.floor(i / mask.chunk) == np.floor(j / mask.chunk)
        if q_segments is not None:
            sees &= q_segments[b, s] == k_segments[b, t] and q_segments[b, s] != 0
        result[b, s, t] = sees
    return result


def index(batch, length):
    return np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))


def reference(q, k, v, dout, dense_mask, soft_cap=None, sinks=None):
    """Output and gradients of q, k, v (and sinks) in float64, with the softmax and its derivative
    written out in numpy.
    """
    groups = q.shape[2] // k.shape[2]
    k_all, v_all = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    raw = SCALE * np.einsum("bshd,bthd->bhst", q, k_all)
    logits = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    exponentials = np.exp(logits) * dense_mask[:, None]
    sink = np.zeros(q.shape[2]) if sinks is None else np.exp(sinks)
    total = exponentials.sum(-1) + sink[None, :, None]
    weights = exponentials / np.where(total == 0, 1, total)[..., None]
    output = np.einsum("bhst,bthv->bshv", weights, v_all)

    dweights = np.einsum("bshv,bthv->bhst", dout, v_all)
    mean = (dweights * weights).sum(-1, keepdims=True)
    draw = weights * (dweights - mean)
    if soft_cap is not None:
        draw = draw * (1 - np.tanh(raw / soft_cap) ** 2)

    def by_group(array):
        return array.reshape(*array.shape[:2], k.shape[2], groups, -1).sum(3)

    dq = SCALE * np.einsum("bhst,bthd->bshd", draw, k_all)
    dk = by_group(SCALE * np.einsum("bhst,bshd->bthd", draw, q))
    dv = by_group(np.einsum("bhst,bshv->bthv", weights, dout))
    if sinks is None:
        return [output, dq, dk, dv]
    sink_weight = sink[None, :, None] / total
    return [output, dq, dk, dv, -(sink_weight * mean[..., 0]).sum((0, 2))]


def torch_reference(q, k, v, dout, dense_mask):
    tensors = [torch.tensor(array).transpose(1, 2).requires_grad_() for array in (q, k, v)]
    output = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.tensor(dense_mask[:, None]), scale=SCALE, enable_gqa=True
    )
    gradients = torch.autograd.grad(output, tensors, torch.tensor(dout).transpose(1, 2))
    return [tensor.detach().transpose(1, 2).numpy() for tensor in (output, *gradients)]


def attend_with_vjp(q, k, v, dout, sinks=None, run=None, dtype=jnp.float32, **options):
    """Output and gradients of `attend` with dot_product, or of the `run` of a back end."""
    options = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    arrays = [jnp.asarray(array, dtype) for array in (q, k, v)]
    arrays += [jnp.asarray(sinks, jnp.float32)] if sinks is not None else []

    def compute(q, k, v, sinks=None):
        if run is not None:
            return run(AttentionInputs(q, k, v, scale=SCALE, sinks=sinks, **options))
        return attend(q, k, v, backend="dot_product", scale=SCALE, sinks=sinks, **options)

    @jax.jit
    def output_and_gradients(arrays, dout):
        output, vjp = jax.vjp(compute, *arrays)
        return [output, *vjp(dout)]

    return output_and_gradients(arrays, jnp.asarray(dout, dtype))


def assert_close(actual, expected, tolerance=1e-5):
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, atol=tolerance, rtol=tolerance
        )


# ---- dot_product, the reference


@pytest.mark.parametrize(
    ("mask", "k_heads"),
    [
        (AttentionMask(), 4),
        (AttentionMask(), 2),
        (AttentionMask(), 1),
        (AttentionMask(causal=False), 2),
        (AttentionMask(window=3), 2),
        (AttentionMask(chunk=5), 2),
    ],
    ids=str,
)
def test_dot_product_matches_torch(mask, k_heads):
    case = problem(q_heads=4, k_heads=k_heads)
    dense_mask = visible(mask, index(2, 12), index(2, 12))
    expected = torch_reference(*case, dense_mask)
    assert_close(attend_with_vjp(*case, mask=mask), expected)
    assert_close(
        expected, reference(*case, dense_mask), 1e-12
    )  # the numpy reference used below equals torch's


def test_dot_product_with_different_lengths_and_value_dim_matches_torch():
    case = problem(q_length=5, k_length=9, v_head_dim=6)
    for mask in (AttentionMask(), AttentionMask(causal=False)):
        expected = torch_reference(*case, visible(mask, index(2, 5), index(2, 9)))
        assert_close(attend_with_vjp(*case, mask=mask), expected)


@pytest.mark.parametrize(
    "mask",
    [AttentionMask(), AttentionMask(causal=False), AttentionMask(window=3), AttentionMask(chunk=4)],
    ids=str,
)
@pytest.mark.parametrize(
    ("soft_cap", "with_sinks"), [(None, False), (1.5, False), (None, True), (1.5, True)]
)
def test_segments_soft_cap_and_sinks(mask, soft_cap, with_sinks):
    case = problem()
    sinks = np.array([-1.0, 0.0, 0.5, 2.0]) if with_sinks else None
    dense_mask = visible(mask, index(2, 12), index(2, 12), SEGMENTS, SEGMENTS)
    expected = reference(*case, dense_mask, soft_cap, sinks)
    actual = attend_with_vjp(*case, sinks=sinks, mask=mask, q_segments=SEGMENTS, soft_cap=soft_cap)
    assert_close(actual, expected)


def test_keys_may_have_their_own_segments():
    case = problem()
    expected = reference(
        *case, visible(AttentionMask(), index(2, 12), index(2, 12), SEGMENTS, SEGMENTS[:, ::-1])
    )
    actual = attend_with_vjp(
        *case, mask=AttentionMask(), q_segments=SEGMENTS, k_segments=SEGMENTS[:, ::-1]
    )
    assert_close(actual, expected)


@pytest.mark.parametrize(
    "mask", [AttentionMask(), AttentionMask(window=3), AttentionMask(chunk=4)], ids=str
)
def test_positions_decide_what_is_visible(mask):
    case = problem(q_length=3, k_length=12)
    q_positions = np.array(
        [[7, 8, 9], [0, 3, 30]], np.int32
    )  # decoding: one row sees only key 0, one query none
    k_positions = np.array([np.arange(12), np.roll(np.arange(12), 5)], np.int32)
    expected = reference(*case, visible(mask, q_positions, k_positions))
    assert_close(
        attend_with_vjp(*case, mask=mask, q_positions=q_positions, k_positions=k_positions),
        expected,
    )
    only_queries = reference(*case, visible(mask, q_positions, index(2, 12)))
    assert_close(attend_with_vjp(*case, mask=mask, q_positions=q_positions), only_queries)


def test_packed_rows_need_no_positions_for_causal_and_window():
    restarting = np.array(
        [[*range(5), *range(4), *range(3)], [*range(2), *range(6), *range(4)]], np.int32
    )
    for mask in (AttentionMask(), AttentionMask(window=3)):
        by_position = visible(mask, restarting, restarting, SEGMENTS, SEGMENTS)
        assert (by_position == visible(mask, index(2, 12), index(2, 12), SEGMENTS, SEGMENTS)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_fully_masked_queries_have_zero_output_and_gradient(dtype, with_sinks):
    case = problem()
    q_segments = np.array([[0] * 12, [1, 1, 0, 0, 5, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    k_segments = np.array([[0] * 12, [1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    fully_masked = ~visible(
        AttentionMask(), index(2, 12), index(2, 12), q_segments, k_segments
    ).any(-1)
    assert fully_masked.sum() == 15  # all of one row, two of padding, and segment 5 that has no key
    output, dq, dk, dv, *dsinks = attend_with_vjp(
        *case,
        sinks=np.zeros(4) if with_sinks else None,
        dtype=dtype,
        mask=AttentionMask(),
        q_segments=q_segments,
        k_segments=k_segments,
    )
    for array in (output, dq, dk, dv, *dsinks):
        assert np.isfinite(np.asarray(array, np.float32)).all()
    assert not np.asarray(output, np.float32)[fully_masked].any()
    assert not np.asarray(dq, np.float32)[fully_masked].any()
    assert not np.asarray(dk, np.float32)[k_segments == 0].any()
    assert not np.asarray(dv, np.float32)[k_segments == 0].any()


def test_float32_logits_improve_bfloat16_outputs():
    """The flags that keep logits in float32 bring the output closer to float64."""
    q, k, v, dout = (
        np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64) for array in problem(head_dim=64)
    )
    expected = reference(q, k, v, dout, visible(AttentionMask(), index(2, 12), index(2, 12)))[0]

    def error(**flags):
        output = attend_with_vjp(q, k, v, dout, dtype=jnp.bfloat16, mask=AttentionMask(), **flags)[
            0
        ]
        assert output.dtype == jnp.bfloat16
        return np.abs(np.asarray(output, np.float64) - expected).mean()

    assert error() < 2e-2
    assert error(float32_logits=True) < 0.8 * error()
    assert error(float32_product=True) == pytest.approx(error(float32_logits=True), rel=0.1)


def test_causal_attention_builds_no_mask_for_each_row():
    case = [jnp.asarray(array, jnp.float32) for array in problem(batch=3)[:3]]
    program = str(
        jax.make_jaxpr(
            lambda q, k, v: attend(
                q, k, v, backend="dot_product", mask=AttentionMask(), scale=SCALE
            )
        )(*case)
    )
    assert "bool[12,12]" in program
    assert "bool[3,12,12]" not in program


# ---- flash: the kernel, interpreted


def interpreted(inputs):
    return flash_module.run(inputs, interpret=True)


SMALL_BLOCKS = BlockSizes(128, 128, 128, 128, 128, 128, 128, 128)
LONG_SEGMENTS = np.repeat(np.array([[1, 2, 0]], np.int32), [100, 130, 26], axis=1)
SINKS = np.array([-1.0, 0.0, 0.5, 2.0])


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (AttentionMask(window=100), {"q_segments": LONG_SEGMENTS, "soft_cap": 1.5, "sinks": SINKS}),
        pytest.param(
            AttentionMask(chunk=96), {"block_sizes": SMALL_BLOCKS}, marks=pytest.mark.slow
        ),
        pytest.param(
            AttentionMask(causal=False), {"q_segments": LONG_SEGMENTS}, marks=pytest.mark.slow
        ),
        pytest.param(
            AttentionMask(),
            {
                "block_sizes": replace(
                    SMALL_BLOCKS, use_fused_bwd=True, kv_dkv=256, k_layout="SEQ_MINOR"
                )
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["window-segments-cap-sinks", "chunk", "all-to-all-segments", "fused-backward"],
)
def test_flash_matches_the_reference(mask, options):
    case = problem(batch=1, q_length=256, q_heads=4, k_heads=2, head_dim=16, v_head_dim=8)
    options = {"block_sizes": SMALL_BLOCKS, **options}
    segments = options.get("q_segments")
    dense_mask = visible_fast(mask, 256, segments)
    expected = reference(*case, dense_mask, options.get("soft_cap"), options.get("sinks"))
    actual = attend_with_vjp(*case, run=interpreted, mask=mask, k_segments=segments, **options)
    assert_close(actual, expected, 2e-5)


def visible_fast(mask, length, segments):
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    dense_mask = (j <= i) | (not mask.causal)
    if mask.window:
        dense_mask &= j > i - mask.window
    if mask.chunk:
        dense_mask &= i // mask.chunk == j // mask.chunk
    if segments is None:
        return dense_mask[None]
    return dense_mask & (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)


def test_flash_zeroes_queries_whose_segment_has_no_key():
    q, k, v, _ = problem(batch=1, q_length=128, head_dim=16)
    q_segments = jnp.asarray(np.repeat([[1, 7]], [64, 64], axis=1), jnp.int32)
    inputs = AttentionInputs(
        jnp.asarray(q, jnp.float32),
        jnp.asarray(k, jnp.float32),
        jnp.asarray(v, jnp.float32),
        AttentionMask(),
        SCALE,
        q_segments=q_segments,
        k_segments=jnp.ones((1, 128), jnp.int32),
    )
    output = np.asarray(interpreted(inputs))
    assert not output[:, 64:].any()
    dense_mask = visible_fast(AttentionMask(), 128, np.ones((1, 128), np.int32))
    expected = reference(q, k, v, np.zeros_like(q), dense_mask)[0]
    np.testing.assert_allclose(output[:, :64], expected[:, :64], atol=1e-5)


@pytest.mark.parametrize(
    "mask", [AttentionMask(), AttentionMask(window=100), AttentionMask(chunk=96)], ids=str
)
def test_flash_lowers_for_a_tpu_without_one(mask):
    """Pallas lowers to Mosaic on any machine: one forward kernel, one for dk and dv, one for dq."""
    q = jax.ShapeDtypeStruct((2, 1024, 4, 192), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 1024, 2, 192), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((2, 1024, 2, 128), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)

    def loss(q, k, v, segments, sinks):
        options = {
            "mask": mask,
            "q_segments": segments,
            "sinks": sinks,
            "soft_cap": 50.0,
        }
        return (
            attend(q, k, v, backend="flash", scale=SCALE, platform="tpu", **options)
            .astype(jnp.float32)
            .sum()
        )

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 4)))
    program = jax.export.export(gradients, platforms=["tpu"])(q, k, v, segments, sinks)
    assert program.mlir_module().count("tpu_custom_call") == 3


def test_computed_mask_is_indexed_by_blocks_and_equal_by_value():
    dense_mask = computed_mask((256, 256), AttentionMask(chunk=96))
    block = dense_mask[slice(128, 256), slice(0, 128)]
    expected = visible_fast(AttentionMask(chunk=96), 256, None)[0]
    assert (block == expected[128:256, 0:128]).all()
    assert dense_mask == computed_mask((256, 256), AttentionMask(chunk=96))
    assert hash(dense_mask) == hash(computed_mask((256, 256), AttentionMask(chunk=96)))
    assert dense_mask != computed_mask((256, 256), AttentionMask(chunk=97))


@pytest.mark.parametrize(
    ("size", "length", "expected"),
    [(512, 2048, 512), (512, 256, 256), (512, 640, 128), (300, 768, 256)],
)
def test_blocks_fit_the_length(size, length, expected):
    assert fit_block(size, length) == expected


# ---- cudnn_flash_jax: its call, computed by XLA (test_attention_gpu.py runs cuDNN)


@pytest.fixture
def xla_implementation(monkeypatch):
    """Run JAX's XLA implementation of the same function, which a CPU has."""
    public = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        assert implementation == "cudnn"
        return public(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)


@pytest.mark.parametrize(
    ("mask", "segments"),
    [
        (AttentionMask(), None),
        (AttentionMask(causal=False), SEGMENTS),
        (AttentionMask(window=1), None),
        (AttentionMask(window=3), None),
        (AttentionMask(window=3), SEGMENTS),
        (AttentionMask(chunk=4), None),
        (AttentionMask(chunk=4), SEGMENTS),
    ],
)
def test_cudnn_call_matches_the_reference(xla_implementation, mask, segments):
    case = problem(v_head_dim=6)
    dense_mask = visible(mask, index(2, 12), index(2, 12), segments, segments)
    actual = attend_with_vjp(
        *case, run=cudnn.run, mask=mask, q_segments=segments, k_segments=segments
    )
    assert_close(actual, reference(*case, dense_mask))


def test_cudnn_pads_queries_and_keys_to_a_larger_value_dim(xla_implementation):
    case = problem(head_dim=8, v_head_dim=16)
    expected = reference(*case, visible(AttentionMask(), index(2, 12), index(2, 12)))
    assert_close(attend_with_vjp(*case, run=cudnn.run, mask=AttentionMask()), expected)
