"""The equivalence matrix: on eight devices, each layout has the loss and the gradients of one
device, and uses the expected collectives only. Layouts are single axes, products of axes and named
rules; each test_layouts_*.py runs one model.
"""

import json
from typing import Any

import pytest

from tests.compiling import cpu_devices
from tests.forked import run_python
from tests.sharding.layouts import LAYOUTS, PLAIN, REFUSED
from tests.tolerance import FACTOR, ULP

# The collectives of each axis. XLA on CPUs implements reduce-scatter by an all-reduce and a slice.
IMPLIED = {
    "data": {"all-reduce"},
    "fsdp": {"all-gather", "all-reduce"},
    "fsdp_transpose": {"all-gather", "all-reduce"},
    "tensor": {"all-reduce"},
    "tensor_sequence": {"all-gather", "all-reduce"},
    "context": {"all-gather", "all-reduce"},
    "expert": {"all-reduce"},
}
# The dense model tests the memory of the state, the MoE model the named rules.
STATE = [
    name
    for name in LAYOUTS
    if any(word in name for word in ("host", "ZeRO", "striped", "tensor, explicit"))
]
NAMED = [name for name, overrides in LAYOUTS.items() if overrides[0].startswith("custom")]
FURTHER = {
    "dense": STATE,
    "moe": [*NAMED, "fsdp x expert, explicit", "dcn data x fsdp x expert"],
    "mla": [],
    "delta": ["context, striped"],
}


# Every axis, every way to place the state and most named rules, in products of axes where one
# program can test several; the other layouts are exhaustive. MLA and Gated DeltaNet differ from the
# other models in the sharding of heads, sequences and their own weights.
PRODUCTS = ("data x fsdp x tensor", "fsdp x context x expert", "context x tensor, balanced")
REPRESENTATIVE = {
    "dense": (
        "fsdp_transpose",
        "fsdp x tensor_sequence",
        *PRODUCTS,
        "data x tensor, ZeRO-1",
        "fsdp, optimizer on the host",
        "fsdp, weights on the host",
        "context, striped",
        "fsdp x tensor, explicit",
    ),
    # the MLA model has experts, too, in the other products
    "moe": (
        "expert",
        "fsdp x tensor_sequence",
        "fsdp x context x expert",
        *(name for name in FURTHER["moe"] if name not in ("ep-as-dp", "cp-as-ep")),
    ),
    "mla": PRODUCTS,
    # eight devices along tensor, for four key heads
    "delta": ("tensor", "fsdp x context x expert", "context x tensor, balanced"),
}


def cases(model: str) -> list[str]:
    return [*PLAIN, *FURTHER[model]]


def parameters(model: str) -> list[Any]:
    """For pytest.mark.parametrize."""
    representative = REPRESENTATIVE[model]
    return [
        pytest.param(name, marks=() if name in representative else pytest.mark.exhaustive)
        for name in cases(model)
    ]


def run(model: str, layouts: list[str]) -> dict[str, dict]:
    """Run layouts in a separate process; returns reports by layout."""
    result = run_python(
        "-m", "tests.sharding.run_layouts", model, *layouts, environment=cpu_devices(8)
    )
    assert result.returncode == 0, result.stderr[-4000:]
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {report["layout"]: report for report in reports}


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
    sizes = [override.split("=") for override in LAYOUTS[layout] if "_parallelism=" in override]
    axes = {
        key.removesuffix("_parallelism").partition("_")[2] for key, size in sizes if size != "1"
    }
    kinds = set().union(*(IMPLIED[axis] for axis in axes))
    return kinds | ({"all-to-all"} if "expert" in axes and model in ("moe", "mla") else set())
