"""Run with eight fake devices: prints the tokens of some requests by kind of model and mesh, as
JSON on the last line.
"""

import json
import sys

import jax
import pytest

from maxtext.inference.engine.engine import InferenceEngine
from tests.inference import few_shapes
from tests.support.random_requests import (
    KINDS,
    configuration,
    new_request,
    programs_of,
    random_weights,
)

LENGTH = 32
REQUESTS = [
    new_request((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), 9),
    new_request((7,), 12, 1.5, 9, 0.9, seed=5),
    new_request((1,) * 20, 6, 1.0, seed=6),
]
PAGED = ["attention=paged", "pagedattn_num_pages=16", "pagedattn_tokens_per_page=4"]
SPLIT_LENGTH = "logical_axis_rules=[[cache_sequence, [context_autoregressive]]]"
MESHES = {
    "tensor": ["ici_tensor_parallelism=2", "ici_fsdp_parallelism=4"],
    "autoregressive": [
        "ici_autoregressive_parallelism=2",
        "ici_tensor_parallelism=1",
        "ici_fsdp_parallelism=-1",
    ],
    "length": [
        "ici_context_autoregressive_parallelism=4",
        "ici_autoregressive_parallelism=2",
        "ici_fsdp_parallelism=1",
        SPLIT_LENGTH,
    ],
}
# test_llm.py has a causal model sharded over tensor.
CASES = [
    ("causal", "autoregressive", PAGED),
    ("causal", "length", PAGED),
    ("latent", "length", []),
    ("delta", "tensor", []),
    ("sinks, windows and experts", "autoregressive", []),
]
CASES_BY_NAME = {
    f"{kind}, {mesh}{', paged' * bool(overrides)}": (kind, mesh, overrides)
    for kind, mesh, overrides in CASES
}


def tokens(kind, overrides, devices):
    config = configuration(*KINDS[kind], *overrides, devices=devices)
    programs = programs_of(config)
    shardings = programs.rules.shardings(programs.template.axes, programs.template.weights)
    weights = jax.device_put(random_weights(kind), shardings)
    engine = InferenceEngine(programs, weights, 4, LENGTH)
    outputs = engine.generate(REQUESTS)
    if devices > 1:
        caches = jax.tree.leaves(engine.executor.state.caches)
        assert any(not array.sharding.is_fully_replicated for array in caches), "no cache is split"
    return outputs


if __name__ == "__main__":
    few_shapes.patch(pytest.MonkeyPatch())
    print(
        json.dumps(
            [tokens(kind, [*MESHES[mesh], *overrides], 8) for kind, mesh, overrides in CASES]
        ),
        file=sys.stdout,
    )
