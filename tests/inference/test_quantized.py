"""Models with kernels of integers: what they compute, what they weigh, on one device and on
eight.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import LLM
from maxtext.checkpoint.weights import flatten
from maxtext.common.errors import ConfigError
from maxtext.kernels.weight_only import QuantizedWeight
from maxtext.models.configuration import load
from maxtext.trainers.run_context import RunContext
from tests.compiling import FAST_COMPILE_FLAGS
from tests.inference.eight_quantized import CASES

pytestmark = pytest.mark.usefixtures("fast_compilation")
FLOAT32 = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
}
KINDS = pytest.mark.parametrize("dtype", ["int8", "int4"])


def is_quantized(leaf):
    return isinstance(leaf, QuantizedWeight)


def in_floats(weights):
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if is_quantized(leaf) else leaf,
        weights,
        is_leaf=is_quantized,
    )


def bytes_of(weights):
    """What a program that takes them says of their size on the device, where two int4 share a
    byte.
    """
    return (
        jax.jit(lambda weights: weights)
        .lower(weights)
        .compile()
        .memory_analysis()
        .argument_size_in_bytes
    )


@pytest.fixture(scope="module")
def quantized(folder):
    return {dtype: LLM.load(folder, quantization=dtype, **FLOAT32) for dtype in ("int8", "int4")}


@pytest.mark.slow
@KINDS
def test_the_logits_are_those_of_the_rounded_weights(llm, quantized, ids, dtype):
    ours = quantized[dtype].logits(ids)
    expected = LLM(llm.config, llm.template, in_floats(quantized[dtype].weights)).logits(ids)
    np.testing.assert_allclose(ours, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    assert float(jnp.abs(ours - llm.logits(ids)).max()) > 1e-3  # so the comparison can fail


@pytest.mark.slow
@KINDS
def test_it_generates_with_a_cache(quantized, ids, dtype):
    """Token by token what the whole sequence gives."""
    prompt = [int(token) for token in ids[0][:5]]
    new = quantized[dtype].generate([prompt], 4, ignore_eos=True)[0]
    scores = np.asarray(quantized[dtype].logits(np.array([prompt + new])))[0]
    assert new == np.argmax(scores[4:-1], axis=-1).tolist()


@pytest.mark.slow
@KINDS
def test_layers_one_by_one(folder, quantized, ids, dtype):
    unrolled = LLM.load(folder, quantization=dtype, scan_layers=False, **FLOAT32)
    np.testing.assert_allclose(unrolled.logits(ids), quantized[dtype].logits(ids), atol=1e-4)


@KINDS
def test_bytes(llm, quantized, dtype):
    """Every number of a kernel as one or half a byte, and the scales: one for each output, since
    sums are short.
    """
    size, width, layers, words = 32, 48, 3, 61
    kernels = size * words + layers * (size * 2 * (4 + 2) * 8 + 3 * size * width)
    scales = words + layers * ((4 + 2 + 2) * 8 + size + 2 * width + size)
    rest = words * size + size + layers * 2 * size
    assert bytes_of(llm.weights) == 4 * (kernels + rest)
    expected = kernels // (2 if dtype == "int4" else 1) + 4 * (scales + rest)
    assert bytes_of(quantized[dtype].weights) == expected
    if dtype == "int8":
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(quantized[dtype].weights)) == expected


@pytest.mark.slow
@KINDS
def test_random_weights_are_born_quantized(dtype):
    words = dict.fromkeys(
        ("base_num_query_heads", "base_num_kv_heads", "base_num_decoder_layers"), 2
    )
    words |= {
        "base_emb_dim": 32,
        "head_dim": 8,
        "base_mlp_dim": 48,
        "vocab_size": 64,
        "max_target_length": 16,
    }
    ours = LLM.load("default", quantization=dtype, **words, **FLOAT32)
    floats = LLM.load("default", **words, **FLOAT32)
    for path, leaf in flatten(floats.weights).items():
        found = flatten(ours.weights)[path]
        assert is_quantized(found) == (path[-1] == "weight")
        if is_quantized(found):
            assert (
                float(jnp.abs(found.astype(jnp.float32) - leaf).max())
                <= float(found.scale.max()) * 0.5001
            )
        else:
            np.testing.assert_array_equal(found, leaf)
    with pytest.raises(
        ConfigError, match="checkpoint_is_quantized=true, but a model by its name has no checkpoint"
    ):
        LLM.load("default", quantization=dtype, checkpoint_is_quantized=True, **words, **FLOAT32)


@pytest.mark.slow
@KINDS
def test_saved_and_loaded_again(folder, quantized, ids, dtype, tmp_path):
    LLM.load(
        folder, quantization=dtype, save_quantized_params_path=str(tmp_path / "ours"), **FLOAT32
    )
    expected = np.asarray(quantized[dtype].logits(ids))
    for keys in ({}, {"checkpoint_is_quantized": True, "quantization": dtype}):
        again = LLM.load(tmp_path / "ours", **keys, **FLOAT32)
        assert again.config.quantization.value == dtype
        np.testing.assert_array_equal(again.logits(ids), expected)
    again.save_hf(tmp_path / "theirs")
    plain = LLM.load(tmp_path / "theirs", **FLOAT32)
    assert not any(is_quantized(leaf) for leaf in flatten(plain.weights).values())
    np.testing.assert_allclose(plain.logits(ids), expected, atol=1e-4)


def test_training_refuses_it():
    with pytest.raises(ConfigError, match=r"quantization=int4 \(command line\) is for inference"):
        RunContext.from_config(
            load(None, ["quantization=int4", "dataset_type=synthetic"], environ={})
        )


@pytest.fixture(scope="module")
def eight():
    """What the script found, with programs ordered to save memory, as they are on accelerators."""
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_concurrency_optimized_scheduler=false"
    flags += f" {FAST_COMPILE_FLAGS}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "eight_quantized.py")],
        capture_output=True,
        text=True,
        timeout=1800,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_the_same_as_on_one_device(eight):
    found = [one for one in eight if "case" in one]
    assert [tuple(one["case"]) for one in found] == CASES
    for one in found:
        assert one["error"] < 1e-5, one
        assert one["split"] >= one["kernels"] * 0.7, one  # the rest does not divide


@pytest.mark.slow
def test_the_floats_of_random_weights_go_as_they_come(eight):
    (found,) = (one for one in eight if "temporary" in one)
    assert found["temporary"] < found["floats"] / 6
