"""Models whose experts are in mxfp4, on a CPU, where each layer's experts are dequantized."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import LLM
from maxtext.common.errors import ConfigError
from maxtext.common.trees import flatten_dict
from maxtext.kernels.weight_only import MXFP4, QuantizedWeight

KEYS = {
    "override_model_config": True,
    "base_num_decoder_layers": 2,
    "base_emb_dim": 64,
    "base_moe_mlp_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_target_length": 32,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
}
IDS = np.random.default_rng(0).integers(0, 64, (2, 9))
LOADED = {key: KEYS[key] for key in ("dtype", "weight_dtype", "matmul_precision")}


@pytest.fixture(scope="module")
def plain():
    return LLM.load("gpt-oss-20b", **KEYS)


@pytest.fixture(scope="module")
def quantized():
    return LLM.load("gpt-oss-20b", quantization=MXFP4, **KEYS)


def test_only_experts_are_quantized(plain, quantized):
    floats = flatten_dict(plain.weights)
    for path, leaf in flatten_dict(quantized.weights).items():
        is_expert = "experts" in path and path[-1] == "weight"
        assert isinstance(leaf, QuantizedWeight) == is_expert
        if is_expert:
            assert leaf.format == MXFP4
            assert leaf.shape == floats[path].shape
            num_bytes = sum(part.nbytes for part in jax.tree.leaves(leaf))
            assert num_bytes == floats[path].size * (16 + 1) // 32
        else:
            np.testing.assert_array_equal(leaf, floats[path])


def test_logits_are_those_of_the_dequantized_weights(plain, quantized):
    def dequantize(leaf):
        return leaf.astype(jnp.float32) if isinstance(leaf, QuantizedWeight) else leaf

    weights = jax.tree.map(
        dequantize, quantized.weights, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight)
    )
    expected = LLM(plain.config, plain.template, weights).logits(IDS)
    np.testing.assert_allclose(quantized.logits(IDS), expected, atol=1e-5)
    assert float(jnp.abs(expected - plain.logits(IDS)).max()) > 1e-2  # so they can differ


def test_generation_equals_the_logits_of_the_sequence(quantized):
    prompt = IDS[0].tolist()
    new = quantized.generate([prompt], 4, ignore_eos=True)[0]
    logits = np.asarray(quantized.logits(np.array([prompt + new])))[0]
    assert new == np.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist()


@pytest.mark.parametrize("scan_layers", [False, True])
def test_folders(quantized, scan_layers, tmp_path):
    """A native folder has the codes; a Hugging Face folder has values that quantize to the same
    codes again."""
    expected = np.asarray(quantized.logits(IDS))
    quantized.save(tmp_path / "native")
    again = LLM.load(tmp_path / "native", scan_layers=scan_layers, **LOADED)
    assert again.config.quantization.value == MXFP4
    np.testing.assert_allclose(again.logits(IDS), expected, atol=1e-5)
    again.save_hf(tmp_path / "hf")
    floats = LLM.load(tmp_path / "hf", scan_layers=scan_layers, **LOADED)
    np.testing.assert_allclose(floats.logits(IDS), expected, atol=1e-5)
    mxfp4 = LLM.load(tmp_path / "hf", quantization=MXFP4, scan_layers=scan_layers, **LOADED)
    np.testing.assert_array_equal(mxfp4.logits(IDS), again.logits(IDS))


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("default", {}, "this model has none: use int4, int8 or fp8"),
        ("gpt-oss-20b", KEYS | {"base_moe_mlp_dim": 48}, "do not divide base_moe_mlp_dim=48"),
        ("gpt-oss-20b", KEYS | {"base_emb_dim": 40}, "do not divide base_emb_dim=40"),
    ],
)
def test_models_that_cannot_be_in_mxfp4(model, keys, message):
    with pytest.raises(ConfigError, match=message):
        LLM.load(model, quantization=MXFP4, **keys)
