"""Models with quantized weights: their logits and their size, on one device and on eight."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import LLM
from maxtext.common.errors import ConfigError
from maxtext.common.trees import flatten_dict
from maxtext.kernels.weight_only import QuantizedWeight
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from tests.compiling import cpu_devices
from tests.forked import run_python
from tests.inference.eight_quantized import CASES

FLOAT32 = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
}
KINDS = pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])


def is_quantized(leaf):
    return isinstance(leaf, QuantizedWeight)


def dequantize_weights(weights):
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if is_quantized(leaf) else leaf,
        weights,
        is_leaf=is_quantized,
    )


def device_bytes(weights):
    """The size on the device, where two int4 share a byte, by the compiler's memory analysis."""
    return (
        jax.jit(lambda weights: weights)
        .lower(weights)
        .compile()
        .memory_analysis()
        .argument_size_in_bytes
    )


@pytest.fixture(scope="module")
def quantized(folder):
    return {
        dtype: LLM.load(folder, quantization=dtype, **FLOAT32) for dtype in ("int8", "int4", "fp8")
    }


@pytest.mark.slow
@KINDS
def test_logits_are_those_of_the_dequantized_weights(llm, quantized, ids, dtype):
    logits = quantized[dtype].logits(ids)
    expected = LLM(llm.config, llm.template, dequantize_weights(quantized[dtype].weights)).logits(
        ids
    )
    np.testing.assert_allclose(logits, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    assert float(jnp.abs(logits - llm.logits(ids)).max()) > 1e-3  # so the comparison can fail


@pytest.mark.slow
@KINDS
def test_generation_with_a_cache(quantized, ids, dtype):
    """The tokens are the argmax of the logits of the complete sequence."""
    prompt = [int(token) for token in ids[0][:5]]
    new = quantized[dtype].generate([prompt], 4, ignore_eos=True)[0]
    logits = np.asarray(quantized[dtype].logits(np.array([prompt + new])))[0]
    assert new == np.argmax(logits[4:-1], axis=-1).tolist()


@pytest.mark.slow
@KINDS
def test_unrolled_layers(folder, quantized, ids, dtype):
    unrolled = LLM.load(folder, quantization=dtype, scan_layers=False, **FLOAT32)
    np.testing.assert_allclose(unrolled.logits(ids), quantized[dtype].logits(ids), atol=1e-4)


@KINDS
def test_bytes(llm, quantized, dtype):
    """A quantized value takes one or half a byte. There is one scale for each output, since the
    contracted dimensions are short.
    """
    embed_dim, hidden_dim, layers, vocab_size = 32, 48, 2, 61
    attention = embed_dim * 2 * (4 + 2) * 8
    quantizable = embed_dim * vocab_size + layers * (attention + 3 * embed_dim * hidden_dim)
    scales = vocab_size + layers * ((4 + 2 + 2) * 8 + embed_dim + 2 * hidden_dim + embed_dim)
    others = vocab_size * embed_dim + embed_dim + layers * 2 * embed_dim
    assert device_bytes(llm.weights) == 4 * (quantizable + others)
    expected = quantizable // (2 if dtype == "int4" else 1) + 4 * (scales + others)
    assert device_bytes(quantized[dtype].weights) == expected
    if dtype != "int4":
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(quantized[dtype].weights)) == expected


@pytest.mark.slow
@KINDS
def test_random_weights_are_initialized_quantized(dtype):
    overrides = dict.fromkeys(
        ("base_num_query_heads", "base_num_kv_heads", "base_num_decoder_layers"), 2
    )
    overrides |= {
        "base_emb_dim": 32,
        "head_dim": 8,
        "base_mlp_dim": 48,
        "vocab_size": 64,
        "max_target_length": 16,
    }
    int_model = LLM.load("default", quantization=dtype, **overrides, **FLOAT32)
    float_model = LLM.load("default", **overrides, **FLOAT32)
    for path, leaf in flatten_dict(float_model.weights).items():
        weight = flatten_dict(int_model.weights)[path]
        assert is_quantized(weight) == (path[-1] == "weight")
        if is_quantized(weight):
            error = float(jnp.abs(weight.astype(jnp.float32) - leaf).max())
            half_a_step = 16 if dtype == "fp8" else 0.5
            assert error <= float(weight.scale.max()) * half_a_step * 1.001
        else:
            np.testing.assert_array_equal(weight, leaf)
    with pytest.raises(
        ConfigError, match="checkpoint_is_quantized=true, but a model by its name has no checkpoint"
    ):
        LLM.load(
            "default", quantization=dtype, checkpoint_is_quantized=True, **overrides, **FLOAT32
        )


@pytest.mark.slow
@KINDS
def test_save_and_load(folder, quantized, ids, dtype, tmp_path):
    LLM.load(
        folder, quantization=dtype, save_quantized_params_path=str(tmp_path / "native"), **FLOAT32
    )
    expected = np.asarray(quantized[dtype].logits(ids))
    for keys in ({}, {"checkpoint_is_quantized": True, "quantization": dtype}):
        again = LLM.load(tmp_path / "native", **keys, **FLOAT32)
        assert again.config.quantization.value == dtype
        np.testing.assert_array_equal(again.logits(ids), expected)
    again.save_hf(tmp_path / "hf")
    float_model = LLM.load(tmp_path / "hf", **FLOAT32)
    assert not any(is_quantized(leaf) for leaf in flatten_dict(float_model.weights).values())
    np.testing.assert_allclose(float_model.logits(ids), expected, atol=1e-4)


def test_training_refuses_quantized_weights():
    with pytest.raises(ConfigError, match=r"quantization=int4 \(command line\) is for inference"):
        build_run_context(load(None, ["quantization=int4", "dataset_type=synthetic"], environ={}))


@pytest.fixture(scope="module")
def eight():
    """The output of the script."""
    done = run_python("-m", "tests.inference.eight_quantized", environment=cpu_devices(8))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_logits_on_eight_devices(eight):
    assert [tuple(result["case"]) for result in eight] == CASES
    for result in eight:
        assert result["error"] < 1e-5, result
        # The sizes of the others are not divisible.
        assert result["num_sharded"] >= result["num_quantized"] * 0.7, result
