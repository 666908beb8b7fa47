"""Every named model has the weights, and computes with the numbers, that its publisher says.

The oracle for weights is the transformers class, built without memory from the published
config.json; what of it acts on numbers is compared layer by layer, once with what our reader makes
of config.json, once with the modules themselves.
"""

import functools
import importlib.util
import json
import warnings
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from maxtext.configs import fields
from maxtext.configs.derive import Devices
from maxtext.layers.rope import frequencies
from maxtext.layers.specs import GatedDeltaNetSpec, RopeSpec
from maxtext.models.configuration import load
from maxtext.models.counts import active_count, breakdown, parameter_count
from maxtext.models.hf_registry import model_layer
from maxtext.models.registry import layers
from maxtext.models.transformer import final_norm, make_template

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

specification = importlib.util.spec_from_file_location(
    "published", Path(__file__).parent / "published.py"
)
table = importlib.util.module_from_spec(specification)
specification.loader.exec_module(table)
PUBLISHED = table.PUBLISHED

# Llama 4 Scout has equal bounds for long and short wavelengths: nothing lies between, and a slope
# is infinite.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


@functools.cache
def named(name):
    """The configuration of a name; scanned, which is faster to describe and has the same
    weights.
    """
    words = [f"model_name={name}", "scan_layers=true", "override_model_config=true"]
    return load(None, words, environ={}, devices=Devices(1))


@functools.cache
def weights(name):
    return make_template(named(name)).weights


def hf_model(name):
    """The transformers model of a published config.json; equal ones are built once."""
    return built(json.dumps(PUBLISHED[name].config))


@functools.cache
def built(text):
    config = json.loads(text)
    model_class = getattr(transformers, config.pop("architectures")[0])
    with torch.device("meta"):
        return model_class(model_class.config_class(**config))


def saved_numbers(model):
    """Parameters, and the buffers that are saved with them: a router's bias, a layer's scale."""
    saved = model.state_dict()
    buffers = [value for name, value in model.named_buffers() if name in saved]
    return sum(value.numel() for value in [*model.parameters(), *buffers])


# ---- weights


def gpt(width, layers, vocabulary, positions):
    """Four matrices of attention and eight of the MLP; biases of 3, 1, 4 and 1 widths; two
    LayerNorms and a last.
    """
    return (
        layers * (12 * width**2 + 9 * width + 4 * width)
        + (vocabulary + positions) * width
        + 2 * width
    )


def latent_attention(width, heads, query_rank, kv_rank, nope=128, rope=64, value=128):
    query = width * query_rank + query_rank + query_rank * heads * (nope + rope)
    key_value = width * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value)
    return query + key_value + heads * value * width


def deepseek(width, attention, dense, sparse, mlp, expert, experts, vocabulary, more=0):
    """Layers with an MLP and layers with experts, one more that all share, a router and its
    bias.
    """
    feed = dense * 3 * width * mlp + sparse * (
        (experts + 1) * 3 * width * expert + width * experts + experts
    )
    return feed + (dense + sparse) * (attention + 2 * width + more) + 2 * vocabulary * width + width


def primes(start, count):
    found = []
    while len(found) < count:
        if all(start % divisor for divisor in range(2, int(start**0.5) + 1)):
            found.append(start)
        start += 1
    return found


def custom():
    """DeepSeek with an indexer, four residual streams, and two layers that remember n-grams: 2
    orders of 8 heads, each with a table of 512 wide rows; as many rows as the next prime that is
    free."""
    width, streams, rows = 1024, 4, 2 * 8 * 512
    indexer = 384 * 16 * 64 + width * 64 + 2 * 64 + width * 16
    connection = (
        streams * width * (2 * streams + streams**2)
        + 3
        + (2 * streams + streams**2)
        + streams * width
    )
    attention = latent_attention(width, 16, 384, 128, 32, 16, 128) + indexer
    memory = (streams + 1) * (rows * width + width) + 3 * streams * width + 4 * streams * width
    total = deepseek(width, attention, 1, 5, 2048, 512, 16, 129280, 2 * connection)
    return total + 2 * memory + sum(primes(226240, 2 * 2 * 8)) * 512


OWN = {
    # base.yml: 16 layers, width 2048, 16 heads of 128, MLP 7168, vocabulary 32000.
    "default": 16 * (4 * 2048**2 + 3 * 2048 * 7168 + 2 * 2048) + 2 * 32000 * 2048 + 2048,
    # The shape of Llama 3.1 405B without its RoPE scaling; its published number of parameters.
    "llama3-405b": 405_853_388_800,
    "gpt3-52k": gpt(16, 1, 1024, 2048),
    "gpt3-6b": gpt(3072, 48, 32768, 16384),
    "gpt3-22b": gpt(6144, 48, 32768, 16384),
    "deepseek3-test": deepseek(
        512, latent_attention(512, 128, 1536, 512), 3, 58, 18432, 512, 256, 129280
    ),
    "deepseek3-tiny": deepseek(64, latent_attention(64, 4, 32, 16), 3, 58, 64, 64, 16, 129280),
    "deepseek-custom": custom(),
    # Attention writes 768 numbers, experts of 2048 work on them, and a matrix widens them to 2048
    # again.
    "qwen3-custom-30b-a3b": 48
    * (2048 + 2 * 2048 * 4096 - (2048 - 768) * 4096 + 2 * 2048 * 512 + 2 * 256 + 768 + 768 * 128)
    + 48 * (128 * 3 * 768 * 2048 + 768 * 2048)
    + 2 * 151936 * 2048
    + 2048,
}


def test_every_name_is_here():
    assert sorted([*PUBLISHED, *OWN]) == sorted(fields.choices("model_name"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_those_of_transformers(name):
    assert (
        parameter_count(weights(name)) == saved_numbers(hf_model(name)) + PUBLISHED[name].difference
    )


@pytest.mark.parametrize("name", [name for name, model in PUBLISHED.items() if model.parameters])
def test_weights_are_as_many_as_published(name):
    assert parameter_count(weights(name)) == PUBLISHED[name].parameters + PUBLISHED[name].difference


@pytest.mark.parametrize("name", OWN)
def test_weights_of_our_own_models(name):
    assert parameter_count(weights(name)) == OWN[name]


@pytest.mark.parametrize("name", fields.choices("model_name"))
def test_parts_are_the_whole(name):
    assert sum(breakdown(weights(name)).values()) == parameter_count(weights(name))
    assert active_count(named(name), weights(name)) <= parameter_count(weights(name))


# Experts that a token does not meet: layers x those not chosen x three matrices (and biases).
IDLE = {
    "mixtral-8x7b": 32 * 6 * 3 * 4096 * 14336,
    "deepseek3-671b": 58 * 248 * 3 * 7168 * 2048,
    "gpt-oss-20b": 24 * 28 * (3 * 2880 * 2880 + 3 * 2880),
    "llama4-17b-128e": 24 * 127 * 3 * 5120 * 8192,
    "gemma4-26b": 30 * 120 * 3 * 2816 * 704,
    "llama2-7b": 0,
}


@pytest.mark.parametrize("name", IDLE)
def test_active_weights(name):
    assert active_count(named(name), weights(name)) == parameter_count(weights(name)) - IDLE[name]


# Billions, as published; some publishers leave out the embedding, which is looked up and not
# multiplied. Qwen3-Next's 3, GLM-4.5-Air's 12
# and MiniMax M2's 10 are too round to compare.
ACTIVE = {
    "mixtral-8x7b": 12.9, "mixtral-8x22b": 39, "deepseek2-236b": 21, "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "qwen3-480b-a35b": 35, "qwen3.5-397b-a17b": 17, "gemma4-26b": 3.8, "llama4-17b-16e": 17,
    "llama4-17b-128e": 17,
}  # fmt: skip
ACTIVE_BUT_EMBEDDING = {
    "deepseek2-16b": 2.4, "deepseek3-671b": 37, "kimi-k2-1t": 32, "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1, "glm4.5-355b-a32b": 32,
}  # fmt: skip


@pytest.mark.parametrize("name", [*ACTIVE, *ACTIVE_BUT_EMBEDDING])
def test_active_weights_are_about_as_published(name):
    active = active_count(named(name), weights(name))
    if name in ACTIVE_BUT_EMBEDDING:
        active -= breakdown(weights(name))["embedding"]
    assert active / 1e9 == pytest.approx((ACTIVE | ACTIVE_BUT_EMBEDDING)[name], rel=0.03)


# ---- numbers


def values(spec, path=(), owner=None):
    """A spec as flat facts; of a rotation, what it computes."""
    if isinstance(spec, RopeSpec):
        facts = {
            "turns": frequencies(spec, turned_size(owner)),
            "magnitude": spec.magnitude,
            "pairs": spec.interleave,
        }
        return {(*path, name): fact for name, fact in facts.items()}
    if not is_dataclass(spec):
        return {path: spec}
    flat = {path: type(spec)}
    for field in dataclass_fields(spec):
        flat |= values(getattr(spec, field.name), (*path, field.name), spec)
    return flat


def turned_size(attention):
    """How much of a head a rotation is given."""
    return getattr(attention, "rope_dim", None) or attention.head_dim


def same(native, published):
    if isinstance(native, np.ndarray | float) and published is not None:
        return np.shape(native) == np.shape(published) and np.allclose(
            native, published, rtol=1e-12, atol=0
        )
    return native == published


def for_inference(spec):
    """A layer without what is a matter of training."""
    feed = spec.mlp
    if hasattr(feed, "balance_weight"):
        return replace(spec, mlp=replace(feed, balance_weight=0.0))
    if hasattr(feed, "experts"):
        return replace(spec, mlp=replace(feed, experts=replace(feed.experts, balance_weight=0.0)))
    return spec


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_are_those_of_the_published_configuration(name):
    read = load(
        None,
        [],
        environ={},
        devices=Devices(1),
        model=model_layer(PUBLISHED[name].config, "config.json"),
    )
    native, published = layers(named(name)), layers(read)
    assert len(native) == len(published)
    for number, (one, other) in enumerate(zip(native, published, strict=True)):
        mine, others = values(for_inference(one)), values(for_inference(other))
        assert mine.keys() == others.keys(), f"layer {number}"
        wrong = [
            f"{path}: {mine[path]}, not {others[path]}"
            for path in mine
            if not same(mine[path], others[path])
        ]
        assert not wrong, f"layer {number}"
    config = named(name)
    assert final_norm(config) == final_norm(read)
    assert config.decoder_block == read.decoder_block  # scaled embeddings come with the family
    assert config.logits_via_embedding == read.logits_via_embedding
    assert not (config.logits_via_embedding and config.normalize_embedding_logits)
    assert (config.final_logits_soft_cap or 0) == (read.final_logits_soft_cap or 0)
    tables = 1 if config.logits_via_embedding else 2
    further = config.vocab_size - read.vocab_size
    if config.trainable_position_size > 0:
        further += config.trainable_position_size - read.trainable_position_size
    assert further * tables * config.emb_dim == PUBLISHED[name].difference


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("gpt3")])
def test_rotations_scales_and_windows_are_those_of_transformers(name):
    model = hf_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rotary = type(model.model.rotary_emb)(model.config)  # with numbers this time
    for number, (spec, layer) in enumerate(
        zip(layers(named(name)), model.model.layers, strict=True)
    ):
        native = spec.attention
        if isinstance(native, GatedDeltaNetSpec):
            assert model.config.layer_types[number] == "linear_attention"
            continue
        module = layer.self_attn
        assert native.scale == pytest.approx(module.scaling, rel=1e-12)
        # Phi's modules ask their configuration.
        stated = model.config if name.startswith("phi") else module
        if getattr(module, "is_sliding", True):  # EXAONE's global layers have the number, too
            assert native.mask.window == getattr(stated, "sliding_window", None)
        if name.startswith(("llama4", "smollm3")):
            assert (native.rope is not None) == bool(module.use_rope)
        if name.startswith("llama4"):
            chunked = model.config.layer_types[number] == "chunked_attention"
            assert native.mask.chunk == (model.config.attention_chunk_size if chunked else None)
        if native.rope is None:
            continue
        kind = "sliding_attention_" if native.mask.window else "full_attention_"
        kind = kind if hasattr(rotary, f"{kind}inv_freq") else ""
        expected = getattr(rotary, f"{kind}inv_freq").numpy()
        np.testing.assert_allclose(
            frequencies(native.rope, turned_size(native)), expected, rtol=2e-6
        )
        assert native.rope.magnitude == pytest.approx(
            getattr(rotary, f"{kind}attention_scaling"), rel=1e-12
        )
