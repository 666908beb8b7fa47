"""fp8 by Triton kernels against fp8 by XLA; interpreted where there is no GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels import norm
from maxtext.kernels.cross_entropy import cross_entropy
from maxtext.kernels.fp8 import fused, matmul, rowwise
from maxtext.kernels.fp8.cross_entropy import head_cross_entropy
from maxtext.kernels.fp8.quantize import E4M3, E5M2, quantize_rows
from maxtext.kernels.quantized_matmul import quantized_matmul
from maxtext.kernels.triton import cross_entropy as cross_entropy_rows
from maxtext.kernels.triton import rms_norm
from tests.kernels.test_quantized_matmul import problem, product, run

ACTIVATIONS = {
    "linear": lambda x: x, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu, "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}  # fmt: skip
KERNELS = (
    "quantize_rowwise", "quantize_gated_rows", "gated_backward_rows", "transpose_fp8", "quantize_and_transpose"
)  # fmt: skip
GATE_TAGS = partial(checkpoint_name, name="gate"), partial(checkpoint_name, name="up")
TAGS = partial(checkpoint_name, name="out"), *GATE_TAGS
ON_GPU = jax.default_backend() == "gpu"


@pytest.fixture
def triton(monkeypatch):
    """As on a GPU, and where there is none, interpreted."""
    for name in KERNELS:
        monkeypatch.setattr(rowwise, name, partial(getattr(rowwise, name), interpret=not ON_GPU))
    for name in ("log_sums", "logits_backward"):
        kernel = partial(getattr(cross_entropy_rows, name), interpret=not ON_GPU)
        monkeypatch.setattr(cross_entropy_rows, name, kernel)
    for name in ("rms_norm_rows", "add_rms_norm_rows", "rms_norm_rows_backward"):
        monkeypatch.setattr(fused, name, partial(getattr(rms_norm, name), interpret=not ON_GPU))
    return "gpu"


@pytest.mark.parametrize("width", [384, 128])
def test_triton_equals_xla_bit_for_bit(triton, width):
    """To the last digit: the same numbers are multiplied, and sums of them are exact here.
    Gradients that are not wider than x have one scale."""
    random = np.random.default_rng(0)
    shapes = (2, 64, 2, 128), (2, 128, 4, 32), (2, 128, width), (2, 64, 4, 32), (2, 64, width)
    x, *kernels, one, other = (random.integers(-8, 9, shape).astype(np.float32) for shape in shapes)

    def both(platform):
        function = partial(
            quantized_matmul, input_dims=2, precision="fp8", dtype=jnp.float32, platform=platform
        )
        return gradients(function, (one, other), x, tuple(kernels))

    for found, expected in zip(both(triton), both(None), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("width", [384, 512])
def test_transpose_fp8(triton, width):
    random = np.random.default_rng(0)
    numbers = jnp.asarray(random.normal(size=(256, width)), E4M3)
    factor = jnp.asarray(2.0 ** random.integers(-3, 1, 256), jnp.float32)
    np.testing.assert_array_equal(np.asarray(rowwise.transpose_fp8(numbers)), np.asarray(numbers).T)
    expected = (numbers.astype(jnp.float32) * factor[:, None]).astype(E4M3)
    np.testing.assert_array_equal(
        np.asarray(rowwise.transpose_fp8(numbers, factor)), np.asarray(expected).T
    )


def test_shapes_without_whole_tiles_are_left_to_xla(triton):
    found, expected = (run("fp8", *problem(), platform=platform) for platform in (triton, None))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def spread(random, *shape):
    """Numbers whose rows differ in size; a row of zeros is among them."""
    x = random.normal(size=shape) * 10.0 ** random.uniform(-3, 3, (*shape[:-1], 1))
    x[(0,) * (len(shape) - 1)] = 0
    return jnp.asarray(x, jnp.bfloat16)


def gradients(function, cotangent, *arrays):
    @partial(jax.jit, compiler_options={} if ON_GPU else {"xla_backend_optimization_level": 0})
    def both(cotangent, *arrays):
        y, back = jax.vjp(function, *arrays)
        return y, back(cotangent)

    return [np.asarray(each, np.float32) for each in jax.tree.leaves(both(cotangent, *arrays))]


def close(found, expected, tolerance):
    """Relative to the size of what is compared, on average."""
    for ours, theirs in zip(found, expected, strict=True):
        assert np.std(ours - theirs) < tolerance * np.std(theirs)


def test_norm_qkv(triton):
    """Against the norm, then products: a number that lies between two of eight bits may go either
    way.
    """
    random = np.random.default_rng(1)
    x, added = spread(random, 2, 64, 384), spread(random, 2, 64, 384)
    scale = jnp.asarray(1 + 0.1 * random.normal(size=384), jnp.float32)
    kernels = tuple(
        jnp.asarray(random.normal(size=shape), jnp.bfloat16)
        for shape in ((384, 2, 128), (384, 128))
    )
    cotangent = added, (spread(random, 2, 64, 2, 128), spread(random, 2, 64, 128))

    def together(x, scale, kernels):
        return fused.norm_qkv(x, scale, kernels, (), None, 1e-5, jnp.bfloat16)

    def apart(x, scale, kernels):
        return x, quantized_matmul(
            norm.rms_norm(x, scale, 1e-5, jnp.bfloat16), kernels, 1, "fp8", jnp.bfloat16
        )

    found, expected = (gradients(each, cotangent, x, scale, kernels) for each in (together, apart))
    np.testing.assert_array_equal(found[0], expected[0])
    close(found[1:], expected[1:], 0.05)


def apply_rope(x, cos, sin):
    """By its definition: pairs (i, i + D/2) of x [..., D] rotated."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def cos_sin(positions, head_dim):
    frequencies = 10_000.0 ** -(jnp.arange(0, head_dim, 2) / head_dim)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotated_products(x, scale, kernels, positions):
    angles = cos_sin(positions, kernels[0].shape[-1])
    return fused.norm_qkv(x, scale, kernels, angles, apply_rope, 1e-5, jnp.bfloat16)


def test_norm_qkv_with_rope(triton):
    """Against RoPE after products, which rounds gradients before they are rotated back."""
    random = np.random.default_rng(5)
    x, positions = spread(random, 2, 64, 384), jnp.asarray(random.integers(0, 1000, (2, 64)))
    scale = jnp.asarray(1 + 0.1 * random.normal(size=384), jnp.float32)
    heads = (6, 64), (2, 64), (2, 64)
    kernels = tuple(jnp.asarray(random.normal(size=(384, *each)), jnp.bfloat16) for each in heads)
    cotangent = spread(random, 2, 64, 384), tuple(spread(random, 2, 64, *each) for each in heads)

    def apart(x, scale, kernels):
        x, (q, k, v) = fused.norm_qkv(x, scale, kernels, (), None, 1e-5, jnp.bfloat16)
        return x, (*(apply_rope(each, *cos_sin(positions, 64)) for each in (q, k)), v)

    together = partial(rotated_products, positions=positions)
    found, expected = (gradients(each, cotangent, x, scale, kernels) for each in (together, apart))
    for ours, theirs in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    close(found[4:], expected[4:], 0.05)


@pytest.mark.parametrize("heads", [(16, 16), (40, 8)])
def test_norm_qkv_with_rope_lowers_for_gpus(heads):
    x, scale = (
        jax.ShapeDtypeStruct((256, 2048), "bfloat16"),
        jax.ShapeDtypeStruct((2048,), "float32"),
    )
    kernels = tuple(
        jax.ShapeDtypeStruct((2048, count, 128), "bfloat16")
        for count in (heads[0], heads[1], heads[1])
    )

    def program(x, scale, kernels, positions):
        y, back = jax.vjp(lambda x: rotated_products(x[None], scale, kernels, positions), x)
        return back(y)

    text = lowered(program, x, scale, kernels, jax.ShapeDtypeStruct((1, 256), "int32"))
    # The norm, turned, and kernels; going back, rows, which are turned, and the norm.
    assert text.count("@__gpu$xla.gpu.triton") == 2 + 3 + 2 + 1


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid])
def test_norm_mlp(triton, activation):
    random = np.random.default_rng(2)
    x, added = spread(random, 2, 64, 384), spread(random, 2, 64, 384)
    scale = jnp.asarray(1 + 0.1 * random.normal(size=384), jnp.float32)
    shapes = (384, 640), (384, 640), (640, 384)
    kernels = tuple(
        jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, jnp.bfloat16) for shape in shapes
    )

    def together(x, scale, kernels):
        return fused.norm_mlp(x, scale, kernels, 1e-5, activation, GATE_TAGS, jnp.bfloat16)

    def apart(multiply, x, scale, kernels):
        y = norm.rms_norm(x, scale, 1e-5, jnp.bfloat16)
        gate, up = multiply(y, kernels[:2])
        hidden = (activation(gate.astype(jnp.float32)) * up).astype(jnp.bfloat16)
        return x, multiply(hidden, kernels[2:])[0]

    def in_eight_bits(x, kernels):
        return quantized_matmul(x, kernels, 1, "fp8", jnp.bfloat16)

    def exactly(x, kernels):
        return [
            jnp.matmul(x, each, precision="highest", preferred_element_type=jnp.float32)
            for each in kernels
        ]

    cotangent = added, spread(random, 2, 64, 384)
    found = gradients(together, cotangent, x, scale, kernels)
    close(
        found[1:], gradients(partial(apart, in_eight_bits), cotangent, x, scale, kernels)[1:], 0.08
    )
    wide = cotangent[0], cotangent[1].astype(jnp.float32)
    close(found[1:], gradients(partial(apart, exactly), wide, x, scale, kernels)[1:], 0.13)


@pytest.mark.parametrize("heads", [4, 6])
def test_out_norm_mlp(triton, heads):
    """Against the product and the sum before the block. With few heads, of tokens of one size, as
    gradients have one scale here, and there one for each token."""
    random = np.random.default_rng(7)
    shapes = (384,), (heads, 64), (384,), (384,)
    if heads * 64 < 384:
        arrays = (
            jnp.asarray(random.normal(size=(2, 64, *shape)), jnp.bfloat16) for shape in shapes
        )
    else:
        arrays = (spread(random, 2, 64, *shape) for shape in shapes)
    x, mixed, added, cotangent = arrays
    scale = jnp.asarray(1 + 0.1 * random.normal(size=384), jnp.float32)
    shapes = (heads, 64, 384), (384, 640), (384, 640), (640, 384)
    out, *kernels = (jnp.asarray(random.normal(size=shape) / 16, jnp.bfloat16) for shape in shapes)
    rest = 1e-5, jax.nn.silu

    def together(x, mixed, out, scale, kernels):
        return fused.out_norm_mlp(x, mixed, out, scale, kernels, *rest, TAGS, jnp.bfloat16)

    def apart(x, mixed, out, scale, kernels):
        x = x + quantized_matmul(mixed, (out,), 2, "fp8", jnp.bfloat16, triton)[0]
        return fused.norm_mlp(x, scale, kernels, *rest, GATE_TAGS, jnp.bfloat16)

    arrays = x, mixed, out, scale, tuple(kernels)
    found, expected = (gradients(each, (added, cotangent), *arrays) for each in (together, apart))
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    close(found[2:], expected[2:], 0.05 if heads * 64 < 384 else 1e-6)


def test_gate_gradients_are_within_their_scales(triton):
    """Also where one product is as large as its factors' lengths, and activations are at their
    steepest.
    """
    kernel = jnp.zeros((128, 128), jnp.bfloat16).at[0].set(1)
    x = (
        jnp.zeros((128, 128), jnp.bfloat16)
        .at[:, 0]
        .set(jnp.linspace(-300, 300, 128, dtype=jnp.bfloat16))
    )

    def block(x, kernels):
        return fused.norm_mlp(
            x, jnp.ones(128), kernels, 1e-5, jax.nn.silu, GATE_TAGS, jnp.bfloat16
        )[1]

    kernels = kernel, kernel, kernel.T
    *_, of_gate, of_up, _ = gradients(block, x * 1e4, x, kernels)

    def exactly(x, kernels):
        gate, up = (
            norm.rms_norm(x, jnp.ones(128), 1e-5, jnp.float32) @ each for each in kernels[:2]
        )
        return (jax.nn.silu(gate) * up) @ kernels[2]

    wide = [each.astype(jnp.float32) for each in kernels]
    *_, expected_gate, expected_up, _ = gradients(
        exactly, x.astype(jnp.float32) * 1e4, x.astype(jnp.float32), wide
    )
    close((of_gate, of_up), (expected_gate, expected_up), 0.1)


@pytest.mark.parametrize("size", [1e-36, 1e-25, 1e25])
def test_gradients_of_one_token_may_be_of_any_size(triton, size):
    random = np.random.default_rng(6)
    kernels = tuple(
        jnp.asarray(random.normal(size=(128, 128)) / 11, jnp.bfloat16) for _ in range(3)
    )
    x, gradient = (jnp.asarray(random.normal(size=(128, 128)), jnp.bfloat16) for _ in range(2))

    def block(x, kernels):
        return fused.norm_mlp(
            x, jnp.ones(128), kernels, 1e-5, jax.nn.silu, GATE_TAGS, jnp.bfloat16
        )[1]

    found = gradients(block, gradient.at[5].mul(size), x, kernels)
    assert all(np.isfinite(each).all() for each in found)
    least = size / 10 if size > 1e-30 else 0  # what is near float32's own least may vanish
    assert least <= np.abs(found[1][5]).max() < 10 * size


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_of_activations_are_bounded(name):
    x = jnp.linspace(-30, 30, 60001)
    assert (
        jnp.max(jnp.abs(jax.jvp(ACTIVATIONS[name], (x,), (jnp.ones_like(x),))[1])) < fused.MAX_SLOPE
    )
    assert abs(ACTIVATIONS[name](0.0)) <= 1


def test_head_cross_entropy(triton):
    """Against the product in fp8, then the loss. Some tokens do not count."""
    random = np.random.default_rng(4)
    x, kernel = (
        spread(random, 2, 64, 256),
        jnp.asarray(random.normal(size=(256, 384)) / 16, jnp.bfloat16),
    )
    targets = jnp.asarray(random.integers(0, 384, (2, 64)))
    of_both = tuple(
        jnp.asarray(random.normal(size=(2, 64)) * (random.random((2, 64)) > 0.3), "float32")
        for _ in "ab"
    )

    def together(x, kernel):
        return head_cross_entropy(x, kernel, targets, jnp.bfloat16)

    def apart(x, kernel):
        return cross_entropy(quantized_matmul(x, (kernel,), 1, "fp8", jnp.bfloat16)[0], targets)

    found, expected = (gradients(each, of_both, x, kernel) for each in (together, apart))
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-3)
    close(found[2:], expected[2:], 0.08)


@pytest.mark.slow
def test_tagged_intermediates_can_be_saved(triton):
    """Two products whose results are kept are not computed again."""
    x, scale = jnp.ones((128, 128), jnp.bfloat16), jnp.ones(128)
    kernels = (x, x, x)

    def products_going_back(*kept):
        policy = jax.checkpoint_policies.save_only_these_names(*kept)

        @partial(jax.checkpoint, policy=policy)
        def block(x, scale, kernels):
            x, y = fused.norm_mlp(x, scale, kernels, 1e-5, jax.nn.silu, GATE_TAGS, jnp.bfloat16)
            return x + y

        _, back = jax.vjp(block, x, scale, kernels)
        return str(jax.make_jaxpr(back)(x)).count("dot_general")

    assert products_going_back("gate", "up") == products_going_back() - 2


@pytest.mark.parametrize("width", [2048, 5120])
def test_out_norm_mlp_lowers_for_gpus(width):
    shapes = (
        (256, width),
        (256, 32, 128),
        (32, 128, width),
        (width, 1408),
        (width, 1408),
        (1408, width),
    )
    x, mixed, out, *kernels = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)

    def program(x, mixed, out, scale, kernels):
        rest = 1e-5, jax.nn.silu, TAGS, jnp.bfloat16
        y, back = jax.vjp(
            lambda *arrays: fused.out_norm_mlp(*arrays, *rest), x, mixed, out, scale, kernels
        )
        return y, back(y)

    text = lowered(
        program, x, mixed, out, jax.ShapeDtypeStruct((width,), "float32"), tuple(kernels)
    )
    # 13 of a gated block; what is rounded, turned, and the kernel; going back, the gradient both
    # ways.
    assert text.count("@__gpu$xla.gpu.triton") == 13 + 3 + 1


def test_matmul_lowers_for_gpus():
    x, kernel, gradient = (
        jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((256, 128), (128, 384), (256, 384))
    )

    def program(x, kernel, gradient):
        y, back = jax.vjp(
            lambda x, kernel: product(x, kernel, 1, "fp8", jnp.bfloat16, "gpu"), x, kernel
        )
        return y, back(gradient)

    text = lowered(program, x, kernel, gradient)
    # Rows and the kernel, turned rows; going back, rows and turned rows.
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 5
    assert text.count("stablehlo.transpose") == 0


@pytest.mark.parametrize(
    ("width", "name"),
    [*((256, name) for name in ACTIVATIONS), (7168, "silu"), (1408, "silu"), (11008, "silu")],
)
def test_norm_mlp_lowers_for_gpus(width, name):
    """Also where the width is a sum of several powers of two."""
    shapes = (256, 2048), (2048, width), (2048, width), (width, 2048)
    x, *kernels = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    scale = jax.ShapeDtypeStruct((2048,), "float32")

    def program(x, scale, kernels):
        y, back = jax.vjp(partial(gated, jnp.bfloat16), x, scale, kernels)
        return y, back(y)

    def gated(dtype, x, scale, kernels):
        return fused.norm_mlp(x, scale, kernels, 1e-5, ACTIVATIONS[name], GATE_TAGS, dtype)

    assert lowered(program, x, scale, tuple(kernels)).count("@__gpu$xla.gpu.triton") == 13


def lowered(program, *arguments):
    return jax.jit(program).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantize_rowwise_equals_xla(triton, dtype):
    random = np.random.default_rng(0)
    some = [spread(random, 256, width) for width in (384, 128)]
    numbers, scale, squares = rowwise.quantize_rowwise(some, dtype)
    expected, scales = quantize_rows(some, 1, dtype)
    factor = jnp.asarray(2.0 ** random.integers(-3, 1, 256), jnp.float32)
    np.testing.assert_array_equal(scale, scales)
    exact = sum(np.sum(np.square(np.asarray(each, np.float64)), axis=1) for each in some)
    np.testing.assert_allclose(squares, exact / np.square(np.asarray(scale, np.float64)), rtol=1e-5)
    for ours, theirs in zip(jnp.split(numbers, [384], axis=1), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
        np.testing.assert_array_equal(
            np.asarray(rowwise.transpose_fp8(ours), np.float32), np.asarray(theirs, np.float32).T
        )
        multiplied = (theirs.astype(jnp.float32) * factor[:, None]).astype(dtype)
        np.testing.assert_array_equal(
            np.asarray(rowwise.transpose_fp8(ours, factor), np.float32),
            np.asarray(multiplied, np.float32).T,
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_rows_stay_nonfinite(triton, bad):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(128, 128)), jnp.bfloat16).at[5, 7].set(bad)
    kernel = jnp.asarray(random.normal(size=(128, 128)), jnp.bfloat16)
    y = np.asarray(product(x, kernel, 1, "fp8", jnp.bfloat16, triton), np.float32)
    assert not np.isfinite(y[5]).any()
    assert np.isfinite(np.delete(y, 5, axis=0)).all()


def test_long_rows_are_quantized_by_xla(triton, monkeypatch):
    """To the same numbers."""
    random = np.random.default_rng(3)
    x, kernel, cotangent = (
        spread(random, 128, 256),
        spread(random, 256, 384),
        spread(random, 128, 384),
    )
    function = partial(
        quantized_matmul, input_dims=1, precision="fp8", dtype=jnp.bfloat16, platform=triton
    )
    expected = gradients(function, (cotangent,), x, (kernel,))
    monkeypatch.setattr(matmul, "MAX_COLUMNS", 128)
    monkeypatch.setattr(rowwise, "quantize_rowwise", None)
    for ours, theirs in zip(gradients(function, (cotangent,), x, (kernel,)), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("x", "kernel", "able"),
    [((256, 128), (128, 128), True), ((192, 128), (128, 128), False), ((256, 128), (128, 192), False),
     ((256, 128), (128, 2**17), True), ((2**15, 128), (128, 2**16), False)],
)  # fmt: skip
def test_supports(x, kernel, able):
    """Whole tiles, and arrays whose places 32 bits can say."""
    assert matmul.supports(x, [kernel], 1, "gpu") is able
