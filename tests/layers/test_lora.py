"""Low-rank adapters in layers and models, against closed forms."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext.common import hash_rng
from maxtext.common.trees import flatten_dict, merge_dicts
from maxtext.configs.sources import from_python
from maxtext.layers.adapters import AdapterInputs, AdapterSpec, AdapterTarget, use_adapter_inputs
from maxtext.layers.context import BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.linear import Linear, LoRALinear, build_linear, project
from maxtext.layers.lora import MAGNITUDE, init_magnitudes, split_adapter
from maxtext.layers.parameters import Initializer
from maxtext.layers.quantized import quantize_weights
from maxtext.layers.specs import MoeSpec, RouterSpec
from maxtext.models.configuration import load
from maxtext.models.transformer import Transformer, build_context, initial_weights, make_template

TINY = dict(
    decoder_block="llama2", base_emb_dim=32, base_mlp_dim=48, base_num_decoder_layers=3,
    base_num_query_heads=4, base_num_kv_heads=2, head_dim=8, vocab_size=64, dtype="float32",
    weight_dtype="float32", matmul_precision="highest", attention="dot_product",
    max_target_length=16, per_device_batch_size=1,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 64, (2, 8))
POSITIONS = np.broadcast_to(np.arange(8), IDS.shape)


def initializer(spec, seed=0):
    key = hash_rng.key_from_seed(seed)
    return Initializer(key, "float32", context=BuildContext(adapters=spec))


def linear(spec, name="query", out_shape=(4, 2), **options):
    axes = ("embed", *[None] * len(out_shape))
    return build_linear(
        initializer(spec), name, in_shape=(6,), out_shape=out_shape, axes=axes, dtype="float32",
        **options,
    )  # fmt: skip


def spec_of(*paths, rank=3, alpha=6.0, **options):
    return AdapterSpec(tuple((path, AdapterTarget(rank, alpha)) for path in paths), **options)


def fill(module, seed=0):
    """Random values for all parameters of the adapters of a module."""
    random = np.random.default_rng(seed)
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable) and str(path[-1]).startswith("lora_"):
            values = random.standard_normal(node[...].shape)
            node.set_value(jnp.asarray(values, node[...].dtype))


@pytest.mark.parametrize("rslora", [False, True])
def test_update_is_scaled_product_of_both_factors(rslora):
    layer = linear(spec_of("query", rslora=rslora), bias=True)
    fill(layer)
    x = np.random.default_rng(1).standard_normal((2, 5, 6)).astype("float32")
    w, a, b = (np.asarray(p[...], "float64") for p in (layer.weight, layer.lora_a, layer.lora_b))
    scale = 6 / np.sqrt(3) if rslora else 6 / 3
    expected = np.einsum("bsi,ihd->bshd", x, w + scale * np.einsum("ir,rhd->ihd", a, b))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_router_has_the_logits_of_its_merged_weight():
    adapted = initializer(spec_of("router")).child("router")
    router = RouterSpec(5, 2).build(adapted, 6, "float32")
    fill(router)
    x = np.random.default_rng(1).standard_normal((2, 4, 6)).astype("float32")
    w, a, b = (np.asarray(p[...], "float64") for p in (router.weight, router.lora_a, router.lora_b))
    np.testing.assert_allclose(router.logits(x), x @ (w + 2 * a @ b), rtol=1e-5, atol=1e-5)


def test_dora_rescales_the_norm_of_each_output():
    layer = linear(spec_of("query", dora=True))
    fill(layer)
    x = np.random.default_rng(1).standard_normal((5, 6)).astype("float32")
    parts = (layer.weight, layer.lora_a, layer.lora_b, layer.lora_magnitude)
    w, a, b, m = (np.asarray(part[...], "float64") for part in parts)
    merged = w + 2 * np.einsum("ir,rhd->ihd", a, b)
    expected = np.einsum("bi,ihd->bhd", x, merged * m / np.sqrt((merged**2).sum(0)))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_project_takes_layers_with_and_without_adapters():
    adapted, plain = linear(spec_of("query")), linear(spec_of("query"), name="key")
    fill(adapted)
    assert isinstance(adapted, LoRALinear)
    assert type(plain) is Linear
    x = np.random.default_rng(1).standard_normal((5, 6)).astype("float32")
    outputs = project(x, plain, adapted)
    np.testing.assert_array_equal(outputs[0], plain(x))
    np.testing.assert_allclose(outputs[1], adapted(x), rtol=1e-6)


def test_initial_factors_have_the_distribution_of_peft():
    spec = spec_of("query", rank=64)
    layer = build_linear(
        initializer(spec), "query", in_shape=(100,), out_shape=(4,), axes=(None, None),
        dtype="float32",
    )  # fmt: skip
    a = np.asarray(layer.lora_a[...])
    assert np.abs(a).max() <= 0.1  # U(-1/sqrt(100), 1/sqrt(100))
    np.testing.assert_allclose(a.std(), 0.1 / np.sqrt(3), rtol=0.05)
    assert not layer.lora_b[...].any()


def test_dropout_is_on_the_adapter_only():
    layer = linear(spec_of("query", dropout=0.5))
    fill(layer)
    x = np.ones((64, 6), "float32")
    with use_adapter_inputs(AdapterInputs(key=jax.random.key(3))):
        dropped = layer(x)
    base = np.einsum("bi,ihd->bhd", x, layer.weight[...])
    update = np.asarray(dropped - base)
    assert len({row.tobytes() for row in update}) > 8
    expected = np.asarray(layer(x) - base)
    np.testing.assert_allclose(update.mean(0), expected[0], rtol=0.6, atol=0.6)


def test_each_row_has_the_adapter_of_its_index():
    spec = spec_of("query")
    single = [linear(spec) for _ in range(2)]
    for seed, layer in enumerate(single):
        fill(layer, seed)
    many = linear(replace(spec, slots=2))
    many.lora_a.set_value(jnp.concatenate([layer.lora_a[...] for layer in single], axis=1))
    many.lora_b.set_value(jnp.concatenate([2.0 * layer.lora_b[...] for layer in single]))
    x = np.random.default_rng(1).standard_normal((3, 5, 6)).astype("float32")
    with use_adapter_inputs(AdapterInputs(ids=jnp.asarray([2, 0, 1]))):
        y = many(x)
    plain = np.einsum("bsi,ihd->bshd", x, many.weight[...])
    expected = [single[1](x)[0], plain[1], single[0](x)[2]]
    np.testing.assert_allclose(y, np.stack(expected), rtol=1e-5, atol=1e-5)
    tokens = np.asarray([[2, 0, 1, 1, 2]] * 3)  # the tokens of a shared row
    with use_adapter_inputs(AdapterInputs(ids=jnp.asarray(tokens))):
        y = many(x)
    np.testing.assert_allclose(y[:, 4], single[1](x)[:, 4], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[:, 1], plain[:, 1], rtol=1e-5, atol=1e-5)


@cache
def model(scan, spec):
    config = load(None, from_python(TINY | {"scan_layers": scan}))
    context = build_context(config, adapters=spec)
    template = make_template(config, context)

    @jax.jit
    def initial_adapter(key):
        return split_adapter(nnx.to_pure_dict(nnx.state(Transformer(config, key, context, True))))[
            1
        ]

    adapter = initial_adapter(hash_rng.key_from_seed(1))
    base = jax.jit(lambda: initial_weights(config, loop=True))()
    return config, template, base, adapter


def filled(adapter):
    return jax.tree.map(lambda x: np.full(x.shape, 0.04, x.dtype), adapter)


def logits(template, weights):
    return jax.jit(lambda weights: template.bind(weights)(IDS, POSITIONS))(weights)


SOME_LAYERS = AdapterSpec(
    tuple(
        (f"layers/{layer}/{name}", AdapterTarget(rank, 8.0))
        for layer, rank in ((0, 2), (2, 4))
        for name in ("attention/query", "attention/out", "mlp/wo")
    )
)


@pytest.mark.parametrize("scan", [False, True])
def test_new_adapter_changes_no_bit_of_the_logits(scan):
    config, template, base, adapter = model(scan, SOME_LAYERS)
    before = logits(make_template(config), base)
    np.testing.assert_array_equal(logits(template, merge_dicts(base, adapter)), before)


@pytest.mark.parametrize("dora", [False, True])
def test_factors_cast_before_a_loop_give_the_same_logits(dora):
    """Only DoRA reads factors in the dtype in which they are stored."""
    config = load(None, from_python(TINY | {"dtype": "bfloat16", "scan_layers": False}))
    spec = replace(SOME_LAYERS, dora=dora)
    template = make_template(config, build_context(config, adapters=spec))
    _, _, base, adapter = model(False, spec)
    weights = merge_dicts(base, filled(adapter))
    cast = template.cast(weights)
    expected = jnp.float32 if dora else jnp.bfloat16
    _, cast_adapter = split_adapter(cast)
    factors = [x for name, x in flatten_dict(cast_adapter).items() if name[-1] != MAGNITUDE]
    assert {x.dtype for x in factors} == {jnp.dtype(expected)}
    np.testing.assert_array_equal(logits(template, cast), logits(template, weights))


def test_stacked_and_unrolled_layers_with_different_ranks_agree():
    results = []
    for scan in (False, True):
        _, template, base, adapter = model(scan, SOME_LAYERS)
        results.append(logits(template, merge_dicts(base, filled(adapter))))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)


def test_only_adapters_are_trained_and_layers_without_one_have_no_gradient():
    _, template, base, adapter = model(False, SOME_LAYERS)
    base_trained, adapter_trained = split_adapter(template.trained)
    assert not any(jax.tree.leaves(base_trained))
    assert all(jax.tree.leaves(adapter_trained))
    adapter = filled(adapter)

    def total(adapter):
        return template.bind(merge_dicts(base, adapter))(IDS, POSITIONS).sum()

    layers = jax.jit(jax.grad(total))(adapter)["layers"][0]["blocks"][0]
    sizes = {
        index: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(layers[index]))
        for index in layers
    }
    assert sizes[0] > 0
    assert sizes[1] == 0
    assert sizes[2] > 0


def test_magnitudes_start_at_the_norms_of_the_weights():
    spec = spec_of("layers/1/attention/key", dora=True)
    for scan in (False, True):
        _, template, base, adapter = model(scan, spec)
        weights = init_magnitudes(template, merge_dicts(base, adapter))
        branch = weights["layers"][0]["blocks"][0]
        key = branch["attention"]["key"] if scan else branch[1]["attention"]["key"]
        norms = np.sqrt(np.square(np.asarray(key["weight"], "float64")).sum(0))
        if scan:
            norms = np.moveaxis(norms, 0, 1)
        np.testing.assert_allclose(key["lora_magnitude"], norms, rtol=1e-5)


@pytest.mark.representative(
    "nf4-True",
    "int8-True",
)
@pytest.mark.parametrize(
    ("dtype", "scan"), [("nf4", True), ("nf4", False), ("int4", True), ("int8", True)]
)
@pytest.mark.slow
def test_gradient_over_quantized_weights_is_that_of_the_dequantized(dtype, scan):
    config, template, base, adapter = model(scan, SOME_LAYERS)
    adapter = filled(adapter)
    plain = make_template(config)
    quantized = jax.jit(lambda base: quantize_weights(plain, base, dtype, 16, head=False))(base)
    assert not hasattr(quantized["head"]["weight"], "qvalue")

    @jax.jit
    def dequantize(quantized):
        return jax.tree.map(
            lambda leaf, like: leaf.astype(like.dtype), quantized, base,
            is_leaf=lambda leaf: hasattr(leaf, "qvalue"),
        )  # fmt: skip

    def total(adapter, base):
        return jnp.square(template.bind(merge_dicts(base, adapter))(IDS, POSITIONS)).sum()

    gradient = jax.jit(jax.grad(total))
    for expected, result in zip(
        jax.tree.leaves(gradient(adapter, dequantize(quantized))),
        jax.tree.leaves(gradient(adapter, quantized)),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("method", ["sparse", "dense", "dropping"])
def test_experts_have_an_adapter_each(method):
    """Against a model whose weights are merged by hand."""
    router = RouterSpec(experts=4, topk=2)
    moe = MoeSpec(router, hidden_dim=5, method=method, capacity_factor=8.0)
    spec = spec_of("experts/wi_0", "experts/wo", rank=2, alpha=4.0)
    layer = moe.build(initializer(spec), 6, "float32")
    fill(layer)
    merged = moe.build(initializer(None), 6, "float32")
    for name in ("wi_0", "wo"):
        source, target = layer.experts.layers[name], merged.experts.layers[name]
        update = 2.0 * np.einsum("xir,xro->xio", source.lora_a[...], source.lora_b[...])
        target.weight.set_value(target.weight[...] + update)
    x = np.random.default_rng(1).standard_normal((2, 4, 6)).astype("float32")
    inputs = LayerInputs(np.broadcast_to(np.arange(4), (2, 4)))

    def run(layer):
        return nnx.jit(lambda layer, x: layer(x, inputs)[0])(layer, x)

    expected = run(merged)
    np.testing.assert_allclose(run(layer), expected, rtol=1e-4, atol=1e-5)
    many = moe.build(initializer(replace(spec, slots=2)), 6, "float32")
    for name in ("wi_0", "wo"):
        source, target = layer.experts.layers[name], many.experts.layers[name]
        zeros = jnp.zeros_like(source.lora_a[...])
        target.lora_a.set_value(jnp.stack([zeros, 2.0 * source.lora_a[...]]))
        target.lora_b.set_value(jnp.stack([source.lora_b[...]] * 2))
    with use_adapter_inputs(AdapterInputs(ids=jnp.asarray([0, 2]))):
        y = run(many)
    base = moe.build(initializer(None), 6, "float32")
    np.testing.assert_allclose(y[0], run(base)[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y[1], expected[1], rtol=1e-4, atol=1e-5)
