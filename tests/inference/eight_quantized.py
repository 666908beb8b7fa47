"""Run by test_quantized.py in its own process with eight CPU devices: prints results as JSON lines.

For each case, the logits of a quantized model on a mesh against those of its weights on one device;
and how much memory the initialization of quantized random weights takes.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

from maxtext import LLM
from maxtext.kernels.weight_only import QuantizedWeight
from tests.sharding.layouts import LAYOUTS, MODELS

ROWS, LENGTH = 8, 8
CASES = [
    ("dense", "int8", "tensor"),
    ("dense", "int4", "fsdp x tensor"),
    ("moe", "int8", "expert x tensor"),
    ("moe", "int4", "fsdp x expert"),
    ("mla", "int8", "tensor"),
]
SMALL = (
    "vocab_size=96",
    f"max_target_length={LENGTH}",
    "base_num_query_heads=8",
    "dtype=float32",
    "matmul_precision=highest",
    "attention=dot_product",
    "remat_policy=none",
    "base_emb_dim=256",
)


def compare(model: str, dtype: str, layout: str) -> dict:
    overrides = dict(override.split("=") for override in (*SMALL, *MODELS[model], *LAYOUTS[layout]))
    llm = LLM.load("default", quantization=dtype, **overrides)
    ids = np.random.default_rng(0).integers(0, 96, (ROWS, LENGTH))
    logits = np.asarray(llm.logits(ids))
    weights = jax.tree.map(
        lambda leaf: jax.device_put(np.asarray(leaf), jax.devices()[0]), llm.weights
    )

    def run(weights):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        return llm.programs.template.bind(weights)(jnp.asarray(ids), positions)

    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(run)(weights))
    quantized = [
        leaf for leaf in jax.tree.leaves(llm.weights, is_leaf=is_quantized) if is_quantized(leaf)
    ]
    return {
        "case": [model, dtype, layout],
        "error": float(np.abs(logits - expected).max() / np.abs(expected).max()),
        "num_quantized": len(quantized),
        "num_sharded": sum(not leaf.qvalue.sharding.is_fully_replicated for leaf in quantized),
    }


def is_quantized(leaf: object) -> bool:
    return isinstance(leaf, QuantizedWeight)


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compare(*case)), flush=True)
