"""Run by test_attend.py in a process with eight CPU devices: the flash kernel on shards, and the
plain definition.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.configs.derive import Devices
from maxtext.kernels.attention import AttentionInputs, AttentionMask, run_attention, validate_inputs
from maxtext.kernels.attention_options import LoadBalancedOrder
from maxtext.layers.attention_sharding import flash_on_shards
from maxtext.models.configuration import load
from maxtext.sharding import AxisRules, make_mesh

LENGTH = 256


def inputs(heads, kv_heads, mask, segments):
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, LENGTH, heads, 128))
    k, v = (jax.random.normal(key, (2, LENGTH, kv_heads, 128)) for key in keys[1:3])
    ids = None
    if segments:  # two documents and padding, in the order of the tokens
        ids = jnp.asarray(
            np.repeat([[1, 2, 0], [1, 2, 2]], [100, 140, 16], axis=1)[:, mask.positions(LENGTH)]
        )
    return AttentionInputs(q, k, v, mask, scale=0.1, q_segments=ids, k_segments=ids)


def errors(case):
    words = [f"ici_{axis}_parallelism={size}" for axis, size in case["mesh"].items()]
    config = load(
        None, words, environ={}, devices=Devices(int(np.prod(list(case["mesh"].values()))))
    )
    rules = AxisRules.from_config(
        config, make_mesh(config, jax.devices()[: config.num_target_devices])
    )
    order = LoadBalancedOrder("dual_chunk_swap", case["balanced"]) if case.get("balanced") else None
    mask = AttentionMask(window=case.get("window"), order=order)
    given = validate_inputs(
        inputs(case["heads"], case["kv_heads"], mask, case.get("segments", False))
    )

    def output(run, q, k, v):
        mixed = run(given.__class__(**{**given.__dict__, "q": q, "k": k, "v": v}))
        return jnp.sum(mixed * jnp.cos(jnp.arange(mixed.size).reshape(mixed.shape))), mixed

    def both(run):
        step = jax.jit(
            jax.value_and_grad(
                lambda *arrays: output(run, *arrays), argnums=(0, 1, 2), has_aux=True
            )
        )
        (_, mixed), gradients = step(given.q, given.k, given.v)
        return [mixed, *gradients]

    actual = both(lambda given: flash_on_shards(rules, given, interpret=True))
    reference = both(lambda given: run_attention(given, "dot_product"))
    return [
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(actual, reference, strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps([errors(case) for case in json.loads(sys.argv[1])]))
