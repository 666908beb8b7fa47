"""Estimates for TPU slices, compiled by libtpu without a TPU; each prints the report."""

import importlib.util
import json
import os
import platform
import subprocess
import sys

import pytest

from maxtext.common.extras import libtpu_mismatch
from maxtext.common.hardware import GIB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None or platform.machine() != "x86_64",
        reason="libtpu is not installed",
    ),
]
# In a separate process, because JAX has started in this one.
SCRIPT = """
import json, sys
from maxtext.cli.estimate import to_json, show
from maxtext.cli.compile import load_for_target
from maxtext.trainers.memory.estimate import estimate_memory, suggest_plans

config, target = load_for_target(None, sys.argv[3:], sys.argv[1], int(sys.argv[2]))
found = estimate_memory(config, target)
suggested = suggest_plans(found)
show(found, suggested)
print(json.dumps(to_json(found, suggested)))
"""
TINY = [
    "base_emb_dim=128",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=32",
    "base_mlp_dim=256",
    "base_num_decoder_layers=2",
    "vocab_size=512",
    "max_target_length=128",
    "per_device_batch_size=1",
    "dataset_type=synthetic",
    "attention=dot_product",
]


def bare_environment():
    """No settings of JAX, libtpu or XLA."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "TPU_", "XLA_"))
    }


def run_estimate(target, *overrides, slices=1):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, target, str(slices), *overrides],
        capture_output=True,
        text=True,
        env=bare_environment(),
    )
    assert result.returncode == 0, result.stderr[-4000:]
    *shown, data = result.stdout.splitlines()
    print("\n".join(shown))
    return json.loads(data)


def test_llama2_7b_on_64_chips():
    found = run_estimate(
        "v5p:4x4x4",
        "model_name=llama2-7b",
        "max_target_length=4096",
        "per_device_batch_size=4",
        "attention=flash",
        "remat_policy=full",
        "dataset_type=synthetic",
    )
    program = found["compiled"]
    assert 6 * GIB < program["peak"] - program["arguments"] < program["temporaries"] < 10 * GIB
    assert found["weights"] == 4 * 6_738_415_616 // 64
    assert program["arguments"] == pytest.approx(
        found["weights"] + found["optimizer"] + found["batch"], rel=0.02
    )
    assert found["fits"]
    if libtpu_mismatch():
        return  # jax may not be able to read the collectives
    collectives = {entry["kind"]: entry for entry in program["collectives"]}
    assert set(collectives) & {"reduce-scatter", "all-reduce"}
    # The weights of each layer are gathered in bfloat16 in the forward and the backward pass.
    assert sum(entry["count"] for entry in collectives.values()) > 2 * 32
    assert sum(entry["bytes"] for entry in collectives.values()) > 2 * 2 * 6_476_005_376


def test_llama3_1_405b_on_1024_chips():
    found = run_estimate(
        "v5p:8x8x16",
        "model_name=llama3.1-405b",
        "max_target_length=8192",
        "per_device_batch_size=1",
        "attention=flash",
        "remat_policy=full",
        "dataset_type=synthetic",
    )
    assert found["parameters"] == 405_853_388_800
    norms = (2 * 126 + 1) * 16_384  # replicated
    assert found["weights"] == 4 * ((405_853_388_800 - norms) // 1024 + norms)
    assert found["fits"]
    assert libtpu_mismatch() or found["compiled"]["collectives"]


def test_two_slices():
    found = run_estimate("v5e-16", *TINY, slices=2)
    assert (found["target"]["devices"], found["target"]["slices"]) == (32, 2)
    assert found["compiled"]["temporaries"] > 0


def test_train_compile_writes_a_step_for_a_slice(tmp_path):
    overrides = [
        *TINY,
        "compile_topology=v5e-8",
        "compile_topology_num_slices=1",
        "compiled_trainstep_file=step.bin",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "maxtext.train_compile", *overrides],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=bare_environment(),
    )
    assert result.returncode == 0, result.stderr[-4000:]
    header = json.loads((tmp_path / "step.bin").read_bytes().partition(b"\n")[0])
    assert (header["platform"], header["devices"]) == ("tpu", 8)
