"""Attention back ends against torch and a float64 reference, forward and gradient; what each supports; the choice.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head size, Dv value size.
"""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxtext.common.errors import ConfigError
from maxtext.kernels.attention import BACKENDS, BlockSizes, Inputs, Request, Visibility, attend, choose, try_backends
from maxtext.kernels.attention import dot_product as dot_product_module
from maxtext.kernels.attention import flash as flash_module
from maxtext.kernels.attention.flash import chunk_mask, fitting

SCALE = 0.3
# Two segments and padding in the first row, three segments in the second: [B=2, 12].
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [3] * 2 + [1] * 6 + [2] * 4], np.int32)


def problem(batch=2, q_length=12, k_length=None, q_heads=4, k_heads=2, head_size=8, value_size=None, seed=0):
    """q, k, v and the gradient that comes back to the output, in float64."""
    k_length, value_size = k_length or q_length, value_size or head_size
    draw = np.random.default_rng(seed).normal
    q = draw(size=(batch, q_length, q_heads, head_size))
    k = draw(size=(batch, k_length, k_heads, head_size))
    v = draw(size=(batch, k_length, k_heads, value_size))
    return q, k, v, draw(size=(batch, q_length, q_heads, value_size))


def visible(visibility, q_positions, k_positions, q_segments=None, k_segments=None):
    """The definition, one pair at a time: [B, S, T] from positions [B, S], [B, T]."""
    batch, q_length = q_positions.shape
    result = np.zeros((batch, q_length, k_positions.shape[1]), bool)
    for b, s, t in np.ndindex(result.shape):
        i, j = int(q_positions[b, s]), int(k_positions[b, t])
        sees = j <= i or not visibility.causal
        if visibility.window is not None:
            sees &= i - visibility.window < j
        if visibility.chunk is not None:
            sees &= np.floor(i / visibility.chunk) == np.floor(j / visibility.chunk)
        if q_segments is not None:
            sees &= q_segments[b, s] == k_segments[b, t] and q_segments[b, s] != 0
        result[b, s, t] = sees
    return result


def index(batch, length):
    return np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))


def reference(q, k, v, gradient, mask, soft_cap=None, sinks=None):
    """Output and gradients of q, k, v (and sinks) in float64: softmax by hand in numpy, its derivative written out."""
    groups = q.shape[2] // k.shape[2]
    k_all, v_all = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    raw = SCALE * np.einsum("bshd,bthd->bhst", q, k_all)
    logits = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    exponentials = np.exp(logits) * mask[:, None]
    sink = np.zeros(q.shape[2]) if sinks is None else np.exp(sinks)
    total = exponentials.sum(-1) + sink[None, :, None]
    weights = exponentials / np.where(total == 0, 1, total)[..., None]
    output = np.einsum("bhst,bthv->bshv", weights, v_all)

    d_weights = np.einsum("bshv,bthv->bhst", gradient, v_all)
    mean = (d_weights * weights).sum(-1, keepdims=True)
    d_raw = weights * (d_weights - mean)
    if soft_cap is not None:
        d_raw = d_raw * (1 - np.tanh(raw / soft_cap) ** 2)

    def by_group(array):
        return array.reshape(*array.shape[:2], k.shape[2], groups, -1).sum(3)

    d_q = SCALE * np.einsum("bhst,bthd->bshd", d_raw, k_all)
    d_k = by_group(SCALE * np.einsum("bhst,bshd->bthd", d_raw, q))
    d_v = by_group(np.einsum("bhst,bshv->bthv", weights, gradient))
    if sinks is None:
        return [output, d_q, d_k, d_v]
    sink_weight = sink[None, :, None] / total
    return [output, d_q, d_k, d_v, -(sink_weight * mean[..., 0]).sum((0, 2))]


def torch_reference(q, k, v, gradient, mask):
    tensors = [torch.tensor(array).transpose(1, 2).requires_grad_() for array in (q, k, v)]
    output = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.tensor(mask[:, None]), scale=SCALE, enable_gqa=True
    )
    gradients = torch.autograd.grad(output, tensors, torch.tensor(gradient).transpose(1, 2))
    return [tensor.detach().transpose(1, 2).numpy() for tensor in (output, *gradients)]


def ours(q, k, v, gradient, sinks=None, run=None, dtype=jnp.float32, **options):
    """Output and gradients of `attend` on dot_product, or of a back end's own `run` on Inputs."""
    options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    arrays = [jnp.asarray(array, dtype) for array in (q, k, v)]
    arrays += [jnp.asarray(sinks, jnp.float32)] if sinks is not None else []

    def compute(q, k, v, sinks=None):
        if run is not None:
            return run(Inputs(q, k, v, scale=SCALE, sinks=sinks, **options))
        return attend(q, k, v, backend="dot_product", scale=SCALE, sinks=sinks, **options)

    # Without jit the operations are compiled one by one and shared by the tests, except for the interpreted kernel.
    output, pull = jax.vjp(compute if run is None else jax.jit(compute), *arrays)
    return [output, *pull(jnp.asarray(gradient, dtype))]


def assert_close(actual, expected, tolerance=1e-5):
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance, rtol=tolerance)


# ---- dot_product, the definition


@pytest.mark.parametrize(
    ("visibility", "k_heads"),
    [
        (Visibility(), 4),
        (Visibility(), 2),
        (Visibility(), 1),
        (Visibility(causal=False), 2),
        (Visibility(window=3), 2),
        (Visibility(chunk=5), 2),
    ],
    ids=str,
)
def test_dot_product_matches_torch(visibility, k_heads):
    case = problem(q_heads=4, k_heads=k_heads)
    mask = visible(visibility, index(2, 12), index(2, 12))
    expected = torch_reference(*case, mask)
    assert_close(ours(*case, visibility=visibility), expected)
    assert_close(expected, reference(*case, mask), 1e-12)  # the numpy reference used below is torch's, too


def test_dot_product_with_other_lengths_and_value_size_matches_torch():
    case = problem(q_length=5, k_length=9, value_size=6)
    for visibility in (Visibility(), Visibility(causal=False)):
        expected = torch_reference(*case, visible(visibility, index(2, 5), index(2, 9)))
        assert_close(ours(*case, visibility=visibility), expected)


@pytest.mark.parametrize(
    "visibility", [Visibility(), Visibility(causal=False), Visibility(window=3), Visibility(chunk=4)], ids=str
)
@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(None, False), (1.5, False), (None, True), (1.5, True)])
def test_segments_soft_cap_and_sinks(visibility, soft_cap, with_sinks):
    case = problem()
    sinks = np.array([-1.0, 0.0, 0.5, 2.0]) if with_sinks else None
    mask = visible(visibility, index(2, 12), index(2, 12), SEGMENTS, SEGMENTS)
    expected = reference(*case, mask, soft_cap, sinks)
    actual = ours(*case, sinks=sinks, visibility=visibility, q_segments=SEGMENTS, soft_cap=soft_cap)
    assert_close(actual, expected)


def test_segments_of_keys_may_be_their_own_array():
    case = problem()
    expected = reference(*case, visible(Visibility(), index(2, 12), index(2, 12), SEGMENTS, SEGMENTS[:, ::-1]))
    actual = ours(*case, visibility=Visibility(), q_segments=SEGMENTS, k_segments=SEGMENTS[:, ::-1])
    assert_close(actual, expected)


@pytest.mark.parametrize("visibility", [Visibility(), Visibility(window=3), Visibility(chunk=4)], ids=str)
def test_positions_decide_what_is_visible(visibility):
    case = problem(q_length=3, k_length=12)
    q_positions = np.array([[7, 8, 9], [0, 3, 30]], np.int32)  # decoding: one row sees only key 0, one query none
    k_positions = np.array([np.arange(12), np.roll(np.arange(12), 5)], np.int32)
    expected = reference(*case, visible(visibility, q_positions, k_positions))
    assert_close(ours(*case, visibility=visibility, q_positions=q_positions, k_positions=k_positions), expected)
    only_queries = reference(*case, visible(visibility, q_positions, index(2, 12)))
    assert_close(ours(*case, visibility=visibility, q_positions=q_positions), only_queries)


def test_packed_rows_need_no_positions_for_causal_and_window():
    restarting = np.array([[*range(5), *range(4), *range(3)], [*range(2), *range(6), *range(4)]], np.int32)
    for visibility in (Visibility(), Visibility(window=3)):
        by_position = visible(visibility, restarting, restarting, SEGMENTS, SEGMENTS)
        assert (by_position == visible(visibility, index(2, 12), index(2, 12), SEGMENTS, SEGMENTS)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(dtype, with_sinks):
    case = problem()
    q_segments = np.array([[0] * 12, [1, 1, 0, 0, 5, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    k_segments = np.array([[0] * 12, [1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    blind = ~visible(Visibility(), index(2, 12), index(2, 12), q_segments, k_segments).any(-1)
    assert blind.sum() == 15  # a whole row, two of padding, and segment 5 that has no key
    output, d_q, d_k, d_v, *d_sinks = ours(
        *case, sinks=np.zeros(4) if with_sinks else None, dtype=dtype, visibility=Visibility(),
        q_segments=q_segments, k_segments=k_segments,
    )  # fmt: skip
    for array in (output, d_q, d_k, d_v, *d_sinks):
        assert np.isfinite(np.asarray(array, np.float32)).all()
    assert not np.asarray(output, np.float32)[blind].any()
    assert not np.asarray(d_q, np.float32)[blind].any()
    assert not np.asarray(d_k, np.float32)[k_segments == 0].any()
    assert not np.asarray(d_v, np.float32)[k_segments == 0].any()


def test_the_output_of_low_precision_inputs():
    """In bfloat16, the flags that keep more of the logits bring the output closer to float64."""
    q, k, v, gradient = (np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64) for array in problem(head_size=64))
    expected = reference(q, k, v, gradient, visible(Visibility(), index(2, 12), index(2, 12)))[0]

    def error(**flags):
        output = ours(q, k, v, gradient, dtype=jnp.bfloat16, visibility=Visibility(), **flags)[0]
        assert output.dtype == jnp.bfloat16
        return np.abs(np.asarray(output, np.float64) - expected).mean()

    assert error() < 2e-2
    assert error(float32_logits=True) < 0.8 * error()
    assert error(float32_product=True) == pytest.approx(error(float32_logits=True), rel=0.1)


def test_plain_causal_attention_builds_no_mask_of_the_batch():
    case = [jnp.asarray(array, jnp.float32) for array in problem(batch=3)[:3]]
    program = str(
        jax.make_jaxpr(lambda q, k, v: attend(q, k, v, backend="dot_product", visibility=Visibility(), scale=SCALE))(
            *case
        )
    )
    assert "bool[12,12]" in program
    assert "bool[3,12,12]" not in program


# ---- flash: the kernel's program, interpreted


def interpreted(inputs):
    return flash_module.run(inputs, interpret=True)


SMALL_BLOCKS = BlockSizes(128, 128, 128, 128, 128, 128, 128, 128)
LONG_SEGMENTS = np.repeat(np.array([[1, 2, 0]], np.int32), [100, 130, 26], axis=1)
SINKS = np.array([-1.0, 0.0, 0.5, 2.0])


@pytest.mark.parametrize(
    ("visibility", "options"),
    [
        (Visibility(window=100), {"q_segments": LONG_SEGMENTS, "soft_cap": 1.5, "sinks": SINKS}),
        pytest.param(Visibility(chunk=96), {"block_sizes": SMALL_BLOCKS}, marks=pytest.mark.slow),
        pytest.param(Visibility(causal=False), {"q_segments": LONG_SEGMENTS}, marks=pytest.mark.slow),
        pytest.param(
            Visibility(),
            {"block_sizes": replace(SMALL_BLOCKS, use_fused_bwd=True, kv_dkv=256, k_layout="SEQ_MINOR")},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["window-segments-cap-sinks", "chunk", "all-to-all-segments", "fused-backward"],
)
def test_flash_matches_the_reference(visibility, options):
    case = problem(batch=1, q_length=256, q_heads=4, k_heads=2, head_size=16, value_size=8)
    options = {"block_sizes": SMALL_BLOCKS, **options}
    segments = options.get("q_segments")
    mask = visible_fast(visibility, 256, segments)
    expected = reference(*case, mask, options.get("soft_cap"), options.get("sinks"))
    actual = ours(*case, run=interpreted, visibility=visibility, k_segments=segments, **options)
    assert_close(actual, expected, 2e-5)


def visible_fast(visibility, length, segments):
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    mask = (j <= i) | (not visibility.causal)
    if visibility.window:
        mask &= j > i - visibility.window
    if visibility.chunk:
        mask &= i // visibility.chunk == j // visibility.chunk
    if segments is None:
        return mask[None]
    return mask & (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)


def test_flash_zeroes_queries_whose_segment_has_no_key():
    q, k, v, _ = problem(batch=1, q_length=128, head_size=16)
    q_segments = jnp.asarray(np.repeat([[1, 7]], [64, 64], axis=1), jnp.int32)
    inputs = Inputs(
        jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32), Visibility(), SCALE,
        q_segments=q_segments, k_segments=jnp.ones((1, 128), jnp.int32),
    )  # fmt: skip
    output = np.asarray(interpreted(inputs))
    assert not output[:, 64:].any()
    mask = visible_fast(Visibility(), 128, np.ones((1, 128), np.int32))
    expected = reference(q, k, v, np.zeros_like(q), mask)[0]
    np.testing.assert_allclose(output[:, :64], expected[:, :64], atol=1e-5)


def test_chunk_mask_is_read_by_blocks_and_equal_by_value():
    mask = chunk_mask((256, 256), 96)
    block = mask[slice(128, 256), slice(0, 128)]
    expected = visible_fast(Visibility(chunk=96), 256, None)[0]
    assert (block == expected[128:256, 0:128]).all()
    assert mask == chunk_mask((256, 256), 96)
    assert hash(mask) == hash(chunk_mask((256, 256), 96))
    assert mask != chunk_mask((256, 256), 97)


@pytest.mark.parametrize(
    ("size", "length", "expected"), [(512, 2048, 512), (512, 256, 256), (512, 640, 128), (300, 768, 256)]
)
def test_blocks_fit_the_length(size, length, expected):
    assert fitting(size, length) == expected


# ---- what each back end supports, and the choice


GPU = Request("gpu", "bfloat16", 256, 256, 8, 2, 128, 128, capability="9.0")
TPU = replace(GPU, platform="tpu", capability="")
CPU = replace(TPU, platform="cpu")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"platform": "cpu"}, "needs a GPU"),
        ({"dtype": "float32"}, "float32"),
        ({"head_size": 264}, "head size"),
        ({"head_size": 100, "value_size": 100}, "head size"),
        ({"head_size": 192, "capability": "8.0"}, "up to 128"),
        ({"head_size": 192, "capability": "10.0"}, "up to 128"),
        ({"capability": "7.5"}, "7.5"),
        ({"capability": "gfx942"}, "NVIDIA"),
        ({"soft_cap": 50.0}, "soft cap"),
        ({"has_sinks": True}, "sinks"),
        ({"custom_positions": True}, "positions"),
        ({"q_length": 128}, "128 and 256"),
        ({"q_length": 1, "visibility": Visibility(causal=False)}, "single query"),
        ({"visibility": Visibility(chunk=100)}, "chunks of 100"),
        ({"has_segments": True, "q_length": 255, "k_length": 255}, "even"),
    ],
)
def test_what_cudnn_cannot_do_goes_to_dot_product(change, word):
    request = replace(GPU, **change)
    assert word in BACKENDS["cudnn_flash_jax"].supports(request)
    assert choose(request) == "dot_product"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float16"},
        {"head_size": 256, "value_size": 256},
        {"head_size": 192},  # MLA
        {"visibility": Visibility(window=64)},
        {"visibility": Visibility(chunk=64)},
        {"visibility": Visibility(causal=False), "q_length": 128},
        {"has_segments": True},
        {"capability": ""},
    ],
)
def test_what_cudnn_can_do_goes_to_it(change):
    assert choose(replace(GPU, **change)) == "cudnn_flash_jax"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"platform": "gpu"}, "needs a TPU"),
        ({"platform": "cpu"}, "needs a TPU"),
        ({"dtype": "float16"}, "float16"),
        ({"q_length": 200, "k_length": 200}, "multiples of 128"),
        ({"custom_positions": True}, "positions"),
        ({"q_length": 128}, "128 and 256"),
    ],
)
def test_what_flash_cannot_do(change, word):
    request = replace(TPU, **change)
    assert word in BACKENDS["flash"].supports(request)
    assert choose(request) != "flash"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float32"},
        {"soft_cap": 50.0, "has_sinks": True, "has_segments": True, "visibility": Visibility(chunk=100)},
        {"head_size": 192},
        {"visibility": Visibility(causal=False), "q_length": 128},
    ],
)
def test_what_flash_can_do_goes_to_it(change):
    assert choose(replace(TPU, **change)) == "flash"


def test_a_cpu_gets_dot_product_which_supports_everything():
    assert choose(CPU) == "dot_product"
    anything = replace(CPU, dtype="float64", q_length=7, custom_positions=True, soft_cap=1.0, has_sinks=True)
    assert BACKENDS["dot_product"].supports(anything) is None


def arrays(**sizes):
    return [jnp.asarray(array, jnp.float32) for array in problem(**sizes)[:3]]


@pytest.mark.parametrize("backend", ["flash", "cudnn_flash_jax"])
def test_a_named_back_end_that_cannot_is_an_error_that_says_what_to_use(backend):
    with pytest.raises(ConfigError) as caught:
        attend(*arrays(), backend=backend, visibility=Visibility(), scale=SCALE, platform="cpu")
    (sentence,) = caught.value.problems
    assert backend in sentence
    assert "use dot_product or autoselected" in sentence


def test_an_error_on_another_platform_names_what_is_best_there():
    with pytest.raises(ConfigError, match="flash has no|use flash or autoselected"):
        attend(*arrays(q_length=128), backend="cudnn_flash_jax", visibility=Visibility(), scale=SCALE, platform="tpu")


def test_an_unknown_back_end_lists_the_known():
    with pytest.raises(ConfigError, match="dot_product, flash, cudnn_flash_jax"):
        attend(*arrays(), backend="flesh", visibility=Visibility(), scale=SCALE)


def test_autoselected_computes_and_logs_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("maxtext"), "propagate", True)
    case = problem(q_length=13)  # a length no other test has asked for
    options = {"visibility": Visibility(), "scale": SCALE, "platform": "cpu"}
    q, k, v = (jnp.asarray(array, jnp.float32) for array in case[:3])
    with caplog.at_level(logging.INFO, logger="maxtext"):
        output = attend(q, k, v, backend="autoselected", **options)
        attend(q, k, v, backend="autoselected", **options)
    assert_close([output], torch_reference(*case, visible(Visibility(), index(2, 13), index(2, 13)))[:1])
    assert [record.message.split(" for ")[0] for record in caplog.records] == ["attention: dot_product on cpu"]


def test_the_log_says_why_the_faster_one_was_not_taken(caplog, monkeypatch):
    from maxtext.kernels.attention.dispatch import announce

    monkeypatch.setattr(logging.getLogger("maxtext"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="maxtext"):
        assert announce(replace(GPU, soft_cap=49.0)) == "dot_product"
    assert "not cudnn_flash_jax: it has no soft cap" in caplog.text


def test_a_window_or_chunk_that_covers_the_row_is_plain_causal(monkeypatch):
    seen = []
    monkeypatch.setattr(dot_product_module, "run", None)
    monkeypatch.setitem(
        BACKENDS, "dot_product", replace(BACKENDS["dot_product"], run=lambda inputs: seen.append(inputs.visibility))
    )
    for visibility in (Visibility(window=12), Visibility(chunk=12), Visibility(window=11)):
        attend(*arrays(), backend="dot_product", visibility=visibility, scale=SCALE)
    assert seen == [Visibility(), Visibility(), Visibility(window=11)]


@pytest.mark.parametrize(
    "options", [{"causal": False, "window": 3}, {"window": 3, "chunk": 4}, {"window": 0}, {"chunk": -1}]
)
def test_impossible_visibility(options):
    with pytest.raises(ConfigError):
        Visibility(**options)


@pytest.mark.parametrize("options", [{"q": 64}, {"kv_layout": "x"}, {"k_layout": "ROW_MAJOR"}])
def test_impossible_block_sizes(options):
    with pytest.raises((ConfigError, TypeError)):
        BlockSizes(**options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sinks": np.zeros(3)}, "sinks"),
        ({"q_segments": np.zeros((2, 3), np.int32)}, "q_segments"),
        ({"k_segments": np.zeros((2, 12), np.int32)}, "need q_segments"),
        ({"q_positions": np.zeros((1, 12), np.int32)}, "q_positions"),
    ],
)
def test_shapes_are_checked(options, word):
    with pytest.raises(ValueError, match=word):
        attend(*arrays(), backend="dot_product", visibility=Visibility(), scale=SCALE, **options)
    with pytest.raises(ValueError, match="multiple"):
        attend(*arrays(q_heads=3), backend="dot_product", visibility=Visibility(), scale=SCALE)


def test_every_back_end_is_tried_here():
    found = dict(try_backends())
    assert set(found) == set(BACKENDS)
    assert found["dot_product"] == "works"
    if jax.default_backend() == "cpu":
        assert found["flash"] == "not here: it needs a TPU"
        assert found["cudnn_flash_jax"] == "not here: it needs a GPU"
