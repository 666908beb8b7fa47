"""fp8 by Triton kernels against fp8 by XLA; interpreted unless there is a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels import cross_entropy as cross_entropy_rows
from maxtext.kernels import rms_norm as triton_rms_norm
from maxtext.kernels.cross_entropy import cross_entropy
from maxtext.kernels.fp8 import fused, matmul, rowwise
from maxtext.kernels.fp8.cross_entropy import head_cross_entropy
from maxtext.kernels.fp8.quantize import E4M3, E5M2, quantize_rows
from maxtext.kernels.quantized_matmul import quantized_matmul
from maxtext.kernels.rms_norm import rms_norm
from tests.support.quantized_matmul import matmul as fp8_matmul
from tests.support.quantized_matmul import problem, run

ACTIVATIONS = {
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
KERNELS = (
    "quantize_rowwise",
    "quantize_gated_rows",
    "gated_backward_rows",
    "transpose_fp8",
    "quantize_and_transpose",
)
GATE_TAGS = partial(checkpoint_name, name="gate"), partial(checkpoint_name, name="up")
TAGS = partial(checkpoint_name, name="out"), *GATE_TAGS
ON_GPU = jax.default_backend() == "gpu"


@pytest.fixture
def triton(monkeypatch):
    """Run Triton kernels, interpreted unless there is a GPU."""
    for name in KERNELS:
        monkeypatch.setattr(rowwise, name, partial(getattr(rowwise, name), interpret=not ON_GPU))
    for name in ("log_sums", "logits_backward"):
        program = partial(getattr(cross_entropy_rows, name), interpret=not ON_GPU)
        monkeypatch.setattr(cross_entropy_rows, name, program)
    for name in ("rms_norm_rows", "add_rms_norm_rows", "rms_norm_rows_backward"):
        monkeypatch.setattr(
            fused, name, partial(getattr(triton_rms_norm, name), interpret=not ON_GPU)
        )
    return "gpu"


@pytest.mark.parametrize("columns", [384, 128])
def test_triton_equals_xla_bit_for_bit(triton, columns):
    """The operands are the same, and their sums are exact here. Gradients that are not wider than x
    have one scale."""
    random = np.random.default_rng(0)
    shapes = (2, 64, 2, 128), (2, 128, 4, 32), (2, 128, columns), (2, 64, 4, 32), (2, 64, columns)
    x, *weights, dy_first, dy_second = (
        random.integers(-8, 9, shape).astype(np.float32) for shape in shapes
    )

    def run_on(platform):
        function = partial(
            quantized_matmul, input_dims=2, precision="fp8", dtype=jnp.float32, platform=platform
        )
        return output_and_gradients(function, (dy_first, dy_second), x, tuple(weights))

    for actual, expected in zip(run_on(triton), run_on(None), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("columns", [384, 512])
def test_transpose_fp8(triton, columns):
    random = np.random.default_rng(0)
    x_fp8 = jnp.asarray(random.normal(size=(256, columns)), E4M3)
    factor = jnp.asarray(2.0 ** random.integers(-3, 1, 256), jnp.float32)
    np.testing.assert_array_equal(np.asarray(rowwise.transpose_fp8(x_fp8)), np.asarray(x_fp8).T)
    expected = (x_fp8.astype(jnp.float32) * factor[:, None]).astype(E4M3)
    np.testing.assert_array_equal(
        np.asarray(rowwise.transpose_fp8(x_fp8, factor)), np.asarray(expected).T
    )


@pytest.mark.slow
def test_shapes_that_are_not_multiples_of_a_tile_use_xla(triton):
    actual, expected = (run("fp8", *problem(), platform=platform) for platform in (triton, None))
    for array, right in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(array, right)


def random_rows(random, *shape):
    """Rows of different magnitudes; the first is zero."""
    x = random.normal(size=shape) * 10.0 ** random.uniform(-3, 3, (*shape[:-1], 1))
    x[(0,) * (len(shape) - 1)] = 0
    return jnp.asarray(x, jnp.bfloat16)


def output_and_gradients(function, cotangent, *arrays):
    @jax.jit
    def run(cotangent, *arrays):
        y, vjp = jax.vjp(function, *arrays)
        return y, vjp(cotangent)

    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(run(cotangent, *arrays))]


def assert_close(actual, expected, tolerance):
    """The RMS error is below `tolerance`, relative to the expected standard deviation."""
    for array, right in zip(actual, expected, strict=True):
        assert np.std(array - right) < tolerance * np.std(right)


def test_norm_qkv(triton):
    """Against the norm followed by matmuls: values between two fp8 values may round either way."""
    random = np.random.default_rng(1)
    x, dresidual = random_rows(random, 2, 64, 384), random_rows(random, 2, 64, 384)
    scale = jnp.asarray(1 + 0.1 * random.normal(size=384), jnp.float32)
    weights = tuple(
        jnp.asarray(random.normal(size=shape), jnp.bfloat16)
        for shape in ((384, 2, 128), (384, 128))
    )
    cotangent = dresidual, (random_rows(random, 2, 64, 2, 128), random_rows(random, 2, 64, 128))

    def fused_op(x, scale, weights):
        return fused.norm_qkv(x, scale, weights, (), None, 1e-5, jnp.bfloat16)

    def unfused(x, scale, weights):
        return x, quantized_matmul(
            rms_norm(x, scale, 1e-5, jnp.bfloat16), weights, 1, "fp8", jnp.bfloat16
        )

    actual, expected = (
        output_and_gradients(function, cotangent, x, scale, weights)
        for function in (fused_op, unfused)
    )
    np.testing.assert_array_equal(actual[0], expected[0])
    assert_close(actual[1:], expected[1:], 0.05)


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


def norm_qkv_with_rope(x, scale, weights, positions):
    angles = cos_sin(positions, weights[0].shape[-1])
    return fused.norm_qkv(x, scale, weights, angles, apply_rope, 1e-5, jnp.bfloat16)


@pytest.mark.slow
def test_norm_qkv_with_rope(triton):
    """Against RoPE after the matmuls, which rounds gradients before the inverse rotation."""
    random = np.random.default_rng(5)
    x, positions = random_rows(random, 2, 64, 384), jnp.asarray(random.integers(0, 1000, (2, 64)))
    scale = jnp.asarray(1 + 0.1 * random.normal(size=384), jnp.float32)
    heads = (6, 64), (2, 64), (2, 64)
    weights = tuple(jnp.asarray(random.normal(size=(384, *shape)), jnp.bfloat16) for shape in heads)
    cotangent = (
        random_rows(random, 2, 64, 384),
        tuple(random_rows(random, 2, 64, *shape) for shape in heads),
    )

    def unfused(x, scale, weights):
        x, (q, k, v) = fused.norm_qkv(x, scale, weights, (), None, 1e-5, jnp.bfloat16)
        return x, (*(apply_rope(x, *cos_sin(positions, 64)) for x in (q, k)), v)

    fused_op = partial(norm_qkv_with_rope, positions=positions)
    actual, expected = (
        output_and_gradients(function, cotangent, x, scale, weights)
        for function in (fused_op, unfused)
    )
    for array, right in zip(actual[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(array, right)
    assert_close(actual[4:], expected[4:], 0.05)


@pytest.mark.parametrize("heads", [(16, 16), (40, 8)])
def test_norm_qkv_with_rope_lowers_for_gpus(heads):
    x, scale = (
        jax.ShapeDtypeStruct((256, 2048), "bfloat16"),
        jax.ShapeDtypeStruct((2048,), "float32"),
    )
    weights = tuple(
        jax.ShapeDtypeStruct((2048, count, 128), "bfloat16")
        for count in (heads[0], heads[1], heads[1])
    )

    def program(x, scale, weights, positions):
        y, vjp = jax.vjp(lambda x: norm_qkv_with_rope(x[None], scale, weights, positions), x)
        return vjp(y)

    text = lowered(program, x, scale, weights, jax.ShapeDtypeStruct((1, 256), "int32"))
    # The norm, its transpose, and the weights; backward: rows, their transpose, and the norm.
    assert text.count("@__gpu$xla.gpu.triton") == 2 + 3 + 2 + 1


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid])
def test_norm_mlp(triton, activation):
    random = np.random.default_rng(2)
    x, dresidual = random_rows(random, 2, 64, 384), random_rows(random, 2, 64, 384)
    scale = jnp.asarray(1 + 0.1 * random.normal(size=384), jnp.float32)
    shapes = (384, 640), (384, 640), (640, 384)
    weights = tuple(
        jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, jnp.bfloat16) for shape in shapes
    )

    def fused_op(x, scale, weights):
        return fused.norm_mlp(x, scale, weights, 1e-5, activation, GATE_TAGS, jnp.bfloat16)

    def unfused(multiply, x, scale, weights):
        y = rms_norm(x, scale, 1e-5, jnp.bfloat16)
        gate, up = multiply(y, weights[:2])
        hidden = (activation(gate.astype(jnp.float32)) * up).astype(jnp.bfloat16)
        return x, multiply(hidden, weights[2:])[0]

    def fp8_matmul(x, weights):
        return quantized_matmul(x, weights, 1, "fp8", jnp.bfloat16)

    def exact_matmul(x, weights):
        return [
            jnp.matmul(x, weight, precision="highest", preferred_element_type=jnp.float32)
            for weight in weights
        ]

    cotangent = dresidual, random_rows(random, 2, 64, 384)
    actual = output_and_gradients(fused_op, cotangent, x, scale, weights)
    expected = output_and_gradients(partial(unfused, fp8_matmul), cotangent, x, scale, weights)
    assert_close(actual[1:], expected[1:], 0.08)
    cotangent32 = cotangent[0], cotangent[1].astype(jnp.float32)
    expected = output_and_gradients(partial(unfused, exact_matmul), cotangent32, x, scale, weights)
    assert_close(actual[1:], expected[1:], 0.13)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.slow
def test_out_norm_mlp(triton, heads):
    """Against the projection and the sum before `norm_mlp`. With few heads, tokens have the same
    magnitude: gradients have one scale here, and there one for each token."""
    random = np.random.default_rng(7)
    shapes = (384,), (heads, 64), (384,), (384,)
    if heads * 64 < 384:
        arrays = (
            jnp.asarray(random.normal(size=(2, 64, *shape)), jnp.bfloat16) for shape in shapes
        )
    else:
        arrays = (random_rows(random, 2, 64, *shape) for shape in shapes)
    x, context, dresidual, cotangent = arrays
    scale = jnp.asarray(1 + 0.1 * random.normal(size=384), jnp.float32)
    shapes = (heads, 64, 384), (384, 640), (384, 640), (640, 384)
    out, *weights = (jnp.asarray(random.normal(size=shape) / 16, jnp.bfloat16) for shape in shapes)
    options = 1e-5, jax.nn.silu

    def fused_op(x, context, out, scale, weights):
        return fused.out_norm_mlp(x, context, out, scale, weights, *options, TAGS, jnp.bfloat16)

    def unfused(x, context, out, scale, weights):
        x = x + quantized_matmul(context, (out,), 2, "fp8", jnp.bfloat16, triton)[0]
        return fused.norm_mlp(x, scale, weights, *options, GATE_TAGS, jnp.bfloat16)

    arrays = x, context, out, scale, tuple(weights)
    actual, expected = (
        output_and_gradients(function, (dresidual, cotangent), *arrays)
        for function in (fused_op, unfused)
    )
    for array, right in zip(actual[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(array, right)
    assert_close(actual[2:], expected[2:], 0.05 if heads * 64 < 384 else 1e-6)


@pytest.mark.slow
def test_gate_gradients_do_not_overflow_their_scales(triton):
    """Also where the Cauchy-Schwarz bound is attained, and activations are at their steepest."""
    weight = jnp.zeros((128, 128), jnp.bfloat16).at[0].set(1)
    x = (
        jnp.zeros((128, 128), jnp.bfloat16)
        .at[:, 0]
        .set(jnp.linspace(-300, 300, 128, dtype=jnp.bfloat16))
    )

    def block(x, weights):
        return fused.norm_mlp(
            x, jnp.ones(128), weights, 1e-5, jax.nn.silu, GATE_TAGS, jnp.bfloat16
        )[1]

    weights = weight, weight, weight.T
    *_, dgate, dup, _ = output_and_gradients(block, x * 1e4, x, weights)

    def exact_mlp(x, weights):
        n = rms_norm(x, jnp.ones(128), 1e-5, jnp.float32)
        gate, up = (n @ weight for weight in weights[:2])
        return (jax.nn.silu(gate) * up) @ weights[2]

    weights32 = [weight.astype(jnp.float32) for weight in weights]
    *_, expected_gate, expected_up, _ = output_and_gradients(
        exact_mlp, x.astype(jnp.float32) * 1e4, x.astype(jnp.float32), weights32
    )
    assert_close((dgate, dup), (expected_gate, expected_up), 0.1)


@pytest.mark.parametrize("magnitude", [1e-36, 1e-25, 1e25])
def test_gradient_of_one_token_may_have_any_magnitude(triton, magnitude):
    random = np.random.default_rng(6)
    weights = tuple(
        jnp.asarray(random.normal(size=(128, 128)) / 11, jnp.bfloat16) for _ in range(3)
    )
    x, dy = (jnp.asarray(random.normal(size=(128, 128)), jnp.bfloat16) for _ in range(2))

    def block(x, weights):
        return fused.norm_mlp(
            x, jnp.ones(128), weights, 1e-5, jax.nn.silu, GATE_TAGS, jnp.bfloat16
        )[1]

    actual = output_and_gradients(block, dy.at[5].mul(magnitude), x, weights)
    assert all(np.isfinite(array).all() for array in actual)
    least = magnitude / 10 if magnitude > 1e-30 else 0  # near float32's smallest, it may underflow
    assert least <= np.abs(actual[1][5]).max() < 10 * magnitude


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_of_activations_are_bounded(name):
    x = jnp.linspace(-30, 30, 60001)
    assert (
        jnp.max(jnp.abs(jax.jvp(ACTIVATIONS[name], (x,), (jnp.ones_like(x),))[1])) < fused.MAX_SLOPE
    )
    assert abs(ACTIVATIONS[name](0.0)) <= 1


def test_head_cross_entropy(triton):
    """Against the matmul in fp8 followed by the loss. Some tokens have no gradient."""
    random = np.random.default_rng(4)
    x, weight = (
        random_rows(random, 2, 64, 256),
        jnp.asarray(random.normal(size=(256, 384)) / 16, jnp.bfloat16),
    )
    targets = jnp.asarray(random.integers(0, 384, (2, 64)))
    cotangents = tuple(
        jnp.asarray(random.normal(size=(2, 64)) * (random.random((2, 64)) > 0.3), "float32")
        for _ in "ab"
    )

    def fused_op(x, weight):
        return head_cross_entropy(x, weight, targets, jnp.bfloat16)

    def unfused(x, weight):
        return cross_entropy(quantized_matmul(x, (weight,), 1, "fp8", jnp.bfloat16)[0], targets)

    actual, expected = (
        output_and_gradients(function, cotangents, x, weight) for function in (fused_op, unfused)
    )
    for array, right in zip(actual[:2], expected[:2], strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-2, atol=1e-3)
    assert_close(actual[2:], expected[2:], 0.08)


@pytest.mark.slow
def test_tagged_intermediates_can_be_saved(triton):
    """Two matmuls whose results are saved are not recomputed."""
    x, scale = jnp.ones((128, 128), jnp.bfloat16), jnp.ones(128)
    weights = (x, x, x)

    def backward_matmuls(*saved):
        policy = jax.checkpoint_policies.save_only_these_names(*saved)

        @partial(jax.checkpoint, policy=policy)
        def block(x, scale, weights):
            x, y = fused.norm_mlp(x, scale, weights, 1e-5, jax.nn.silu, GATE_TAGS, jnp.bfloat16)
            return x + y

        _, vjp = jax.vjp(block, x, scale, weights)
        return str(jax.make_jaxpr(vjp)(x)).count("dot_general")

    assert backward_matmuls("gate", "up") == backward_matmuls() - 2


@pytest.mark.parametrize("embed_dim", [2048, 5120])
def test_out_norm_mlp_lowers_for_gpus(embed_dim):
    shapes = (
        (256, embed_dim),
        (256, 32, 128),
        (32, 128, embed_dim),
        (embed_dim, 1408),
        (embed_dim, 1408),
        (1408, embed_dim),
    )
    x, context, out, *weights = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)

    def program(x, context, out, scale, weights):
        options = 1e-5, jax.nn.silu, TAGS, jnp.bfloat16
        y, vjp = jax.vjp(
            lambda *arrays: fused.out_norm_mlp(*arrays, *options), x, context, out, scale, weights
        )
        return y, vjp(y)

    text = lowered(
        program, x, context, out, jax.ShapeDtypeStruct((embed_dim,), "float32"), tuple(weights)
    )
    # 13 of norm_mlp; the context, its transpose, and the weight; backward: dy and its transpose,
    # in one kernel.
    assert text.count("@__gpu$xla.gpu.triton") == 13 + 3 + 1


def test_matmul_lowers_for_gpus():
    x, weight, dy = (
        jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((256, 128), (128, 384), (256, 384))
    )

    def program(x, weight, dy):
        y, vjp = jax.vjp(
            lambda x, weight: fp8_matmul(x, weight, 1, "fp8", jnp.bfloat16, "gpu"), x, weight
        )
        return y, vjp(dy)

    text = lowered(program, x, weight, dy)
    # Rows, the weight and transposed rows; backward: rows and transposed rows.
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 5
    assert text.count("stablehlo.transpose") == 0


@pytest.mark.parametrize(
    ("hidden_dim", "name"),
    [*((256, name) for name in ACTIVATIONS), (7168, "silu"), (1408, "silu"), (11008, "silu")],
)
def test_norm_mlp_lowers_for_gpus(hidden_dim, name):
    """Also where hidden_dim is a sum of several powers of two."""
    shapes = (256, 2048), (2048, hidden_dim), (2048, hidden_dim), (hidden_dim, 2048)
    x, *weights = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    scale = jax.ShapeDtypeStruct((2048,), "float32")

    def program(x, scale, weights):
        y, vjp = jax.vjp(partial(gated, jnp.bfloat16), x, scale, weights)
        return y, vjp(y)

    def gated(dtype, x, scale, weights):
        return fused.norm_mlp(x, scale, weights, 1e-5, ACTIVATIONS[name], GATE_TAGS, dtype)

    assert lowered(program, x, scale, tuple(weights)).count("@__gpu$xla.gpu.triton") == 13


def lowered(program, *arguments):
    return jax.jit(program).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantize_rowwise_equals_xla(triton, dtype):
    random = np.random.default_rng(0)
    matrices = [random_rows(random, 256, columns) for columns in (384, 128)]
    x_fp8, scale, squares = rowwise.quantize_rowwise(matrices, dtype)
    expected, expected_scale = quantize_rows(matrices, 1, dtype)
    factor = jnp.asarray(2.0 ** random.integers(-3, 1, 256), jnp.float32)
    np.testing.assert_array_equal(scale, expected_scale)
    exact = sum(np.sum(np.square(np.asarray(x, np.float64)), axis=1) for x in matrices)
    np.testing.assert_allclose(squares, exact / np.square(np.asarray(scale, np.float64)), rtol=1e-5)
    for array, right in zip(jnp.split(x_fp8, [384], axis=1), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(right, np.float32))
        np.testing.assert_array_equal(
            np.asarray(rowwise.transpose_fp8(array), np.float32), np.asarray(right, np.float32).T
        )
        multiplied = (right.astype(jnp.float32) * factor[:, None]).astype(dtype)
        np.testing.assert_array_equal(
            np.asarray(rowwise.transpose_fp8(array, factor), np.float32),
            np.asarray(multiplied, np.float32).T,
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_rows_stay_nonfinite(triton, bad):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(128, 128)), jnp.bfloat16).at[5, 7].set(bad)
    weight = jnp.asarray(random.normal(size=(128, 128)), jnp.bfloat16)
    y = np.asarray(fp8_matmul(x, weight, 1, "fp8", jnp.bfloat16, triton), np.float32)
    assert not np.isfinite(y[5]).any()
    assert np.isfinite(np.delete(y, 5, axis=0)).all()


def test_long_rows_are_quantized_by_xla(triton, monkeypatch):
    """To the same values."""
    random = np.random.default_rng(3)
    x, weight, cotangent = (
        random_rows(random, 128, 256),
        random_rows(random, 256, 384),
        random_rows(random, 128, 384),
    )
    function = partial(
        quantized_matmul, input_dims=1, precision="fp8", dtype=jnp.bfloat16, platform=triton
    )
    expected = output_and_gradients(function, (cotangent,), x, (weight,))
    monkeypatch.setattr(matmul, "MAX_COLUMNS", 128)
    monkeypatch.setattr(rowwise, "quantize_rowwise", None)
    for array, right in zip(
        output_and_gradients(function, (cotangent,), x, (weight,)), expected, strict=True
    ):
        np.testing.assert_array_equal(array, right)


@pytest.mark.parametrize(
    ("x", "weight", "supported"),
    [
        ((256, 128), (128, 128), True),
        ((192, 128), (128, 128), False),
        ((256, 128), (128, 192), False),
        ((256, 128), (128, 2**17), True),
        ((2**15, 128), (128, 2**16), False),
    ],
)
def test_supports(x, weight, supported):
    """Multiples of a tile, and 32-bit offsets."""
    assert matmul.supports(x, [weight], 1, "gpu") is supported
