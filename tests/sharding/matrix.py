"""The equivalence matrix: on eight devices, every layout has the loss and the gradients of one
device, and sends what it implies and no more. Each axis alone, products, named layouts;
test_layouts_*.py run it, one file for each model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sharding.layouts import LAYOUTS, PLAIN, REFUSED
from tests.tolerance import FACTOR, ULP

ROOT = Path(__file__).parents[2]
# What an axis that is larger than one implies. XLA on CPUs writes a reduce-scatter as an all-reduce
# and a slice.
IMPLIED = {
    "data": {"all-reduce"},
    "fsdp": {"all-gather", "all-reduce"},
    "fsdp_transpose": {"all-gather", "all-reduce"},
    "tensor": {"all-reduce"},
    "tensor_sequence": {"all-gather", "all-reduce"},
    "context": {"all-gather", "all-reduce"},
    "expert": {"all-reduce"},
}
# The dense model shows how a state is kept, the one with experts the named layouts.
KEPT = [
    name
    for name in LAYOUTS
    if any(word in name for word in ("host", "ZeRO", "striped", "tensor, explicit"))
]
NAMED = [name for name, words in LAYOUTS.items() if words[0].startswith("custom")]
FURTHER = {
    "dense": KEPT,
    "moe": [*NAMED, "fsdp x expert, explicit", "dcn data x fsdp x expert"],
    "mla": [],
    "delta": ["context, striped"],
}


# Latent attention and Gated DeltaNets differ from the other models in how they split heads,
# sequences and their own weights: each axis that splits one of these, and a product of three.
REPRESENTATIVE = (
    "fsdp",
    "tensor",
    "context",
    "expert",
    "context x tensor, balanced",
    "data x fsdp x tensor",
)


def cases(model: str) -> list[str]:
    return [*PLAIN, *FURTHER[model]]


def parameters(model: str) -> list[Any]:
    """For pytest.mark.parametrize: of the models that share most of their code with others, some
    layouts stand for all."""
    return [
        pytest.param(name, marks=pytest.mark.exhaustive)
        if model in ("mla", "delta") and name not in REPRESENTATIVE
        else name
        for name in cases(model)
    ]


def run(model: str, layouts: list[str]) -> dict[str, dict]:
    """{layout: report}, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sharding.run_layouts", model, *layouts],
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=ROOT,
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {report["layout"]: report for report in found}


def check(model: str, layout: str, report: dict) -> None:
    if (model, layout) in REFUSED:
        assert REFUSED[model, layout] in report["refused"]
        return
    assert report["loss"] < FACTOR * ULP
    error, tensor, step = report["gradient"]
    assert error < FACTOR * max(report["noise"], ULP), f"the gradient of {tensor} in step {step}"
    assert set(report["collectives"]) >= implied(model, layout)
    if layout == "data":
        assert "all-gather" not in report["collectives"]
    assert report["gathered"] == []


def implied(model, layout):
    sizes = [word.split("=") for word in LAYOUTS[layout] if "_parallelism=" in word]
    axes = {
        key.removesuffix("_parallelism").partition("_")[2] for key, size in sizes if size != "1"
    }
    kinds = set().union(*(IMPLIED[axis] for axis in axes))
    return kinds | ({"all-to-all"} if "expert" in axes and model in ("moe", "mla") else set())
