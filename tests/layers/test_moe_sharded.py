"""Mixtures of experts on eight devices, in a process of their own: values, gradients and
collectives of each layout.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.models.common import moe_spec, router_spec
from maxtext.models.configuration import load
from tests.layers.eight_experts import BATCH, CASES, EXPERTS, LENGTH, PLAIN, SIZE, WIDTH

ROOT = Path(__file__).parents[2]
TOKENS, KERNEL = (
    BATCH * LENGTH * SIZE,
    EXPERTS * SIZE * WIDTH,
)  # elements of x and of a kernel, whole
LOGITS = BATCH * LENGTH * EXPERTS


@pytest.fixture(scope="module")
def eight():
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "eight_experts.py")],
        capture_output=True, text=True, timeout=1800, env=os.environ | flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_same_as_on_one_device(eight, name):
    found = eight["cases"][name]
    most = (
        0.02 if name.startswith("fp8") else 2e-6
    )  # what differs in the last bit may be rounded apart
    wrong = {tensor: error for tensor, error in found["errors"].items() if not error < most}
    assert not wrong
    assert found["smallest"] > 0.1  # nothing was compared with zeros
    assert len(found["errors"]) >= 5
    assert (found["dropped"] > 5) == name.startswith("bound")


def sizes(eight, name, kind):
    return {size for found, size in eight["cases"][name]["collectives"] if found == kind}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in CASES if not name.startswith(("dense", "dropping"))]
)
def test_nothing_is_gathered_needlessly(eight, name):
    """Tokens only of devices that share them, kernels only over axes that split the tokens, too."""
    axes, options = CASES[name]
    if options.get("ragged"):
        return  # emulated by gathers
    owners = axes.get("expert", 1) * (axes["fsdp"] if name == "two owner axes" else 1)
    rows = math.prod(axes.get(axis, 1) for axis in ("data", "fsdp", "fsdp_transpose", "expert"))
    if options.get("batch"):
        rows = 1
    elif options.get("spec", PLAIN).ring:
        rows //= owners
    if name == "6 experts on 4 devices":  # nobody owns experts, so all devices have all
        owners = 1
    gathered = sizes(eight, name, "all-gather")
    if rows > 1:
        assert not {TOKENS, LOGITS} & gathered
    assert max(gathered, default=0) <= max(
        TOKENS // rows, KERNEL // owners // axes.get("tensor", 1)
    )


@pytest.mark.slow
def test_collectives(eight):
    """What each layout implies, and nothing in its place."""
    travelling = {
        "expert",
        "fsdp x expert",
        "expert x tensor",
        "biases",
        "weighed input",
        "two owner axes",
    }
    for name in travelling:
        assert sizes(eight, name, "all-to-all"), name
    for name in (
        "data",
        "fsdp",
        "tensor",
        "ring",
        "6 experts on 4 devices",
        "ragged",
        "experts on fsdp",
    ):
        assert not sizes(eight, name, "all-to-all"), name
    assert sizes(eight, "data", "all-reduce") == {KERNEL}  # gradients of the kernels
    for name in ("fsdp", "fsdp_transpose", "context"):
        assert KERNEL in sizes(eight, name, "all-gather")
        assert sizes(eight, name, "reduce-scatter") == {KERNEL // 8}
    for name in ("tensor", "tensor_sequence"):
        assert TOKENS // 8 in sizes(eight, name, "reduce-scatter")
        assert (
            max(sizes(eight, name, "all-gather")) == TOKENS
        )  # by embedding or length, and no kernel
    assert KERNEL not in sizes(eight, "expert", "all-gather") | sizes(eight, "expert", "all-reduce")
    # Four devices gather the tokens that they share, half of the batch; the sum is scattered.
    assert TOKENS // 2 in sizes(eight, "ring", "all-gather")
    assert TOKENS // 8 in sizes(eight, "ring", "reduce-scatter")
    # Two stages: first over one axis, then over the other.
    assert {KERNEL // 2, KERNEL} <= sizes(eight, "two stages", "all-gather")


@pytest.mark.slow
def test_tags_are_saved_inside(eight):
    assert eight["saved"]["nothing"] - eight["saved"]["tags"] == 3  # two branches and the output


@pytest.mark.slow
def test_ragged_exchange_lowers_for_platforms_that_have_it(eight):
    assert eight["lowered"]["tpu"] == eight["lowered"]["cuda"] > 1


MIXTRAL = ["decoder_block=mixtral", "num_experts_per_tok=2", "per_device_batch_size=1"]


def configure(*words, experts=8):
    return load(None, [*MIXTRAL, f"num_experts={experts}", *words], environ={}, devices=Devices(8))


EXPERT = ("ici_expert_parallelism=4",)
SPLIT = {
    "ring": ("use_ring_of_experts=true", EXPERT),
    "two_stage_gather": (
        "moe_fsdp_use_two_stage_all_gather=true",
        ("ici_fsdp_transpose_parallelism=2",),
    ),
    "experts_on_fsdp": ("shard_exp_on_fsdp=true", ()),
}


@pytest.mark.parametrize("field", SPLIT)
def test_keys_reach_the_layer(field):
    key, words = SPLIT[field]
    for config, set_ in ((configure(*words), False), (configure(key, *words), True)):
        assert getattr(moe_spec(config, router_spec(config)), field) is set_


REFUSED = {
    "a ring of one": (["use_ring_of_experts=true"], "use_ring_of_experts=true would do nothing"),
    "a ring of dense experts": (
        ["use_ring_of_experts=true", "sparse_matmul=false", *EXPERT], "it needs sparse_matmul=true",
    ),
    "one stage": (["moe_fsdp_use_two_stage_all_gather=true"], "ici_fsdp_transpose_parallelism above 1"),
    "fsdp of one": (["shard_exp_on_fsdp=true", "ici_fsdp_parallelism=1", "ici_data_parallelism=8"], "would do nothing"),
    "fsdp beside expert": (["shard_exp_on_fsdp=true", *EXPERT], "leaves the mesh axis 'expert' without experts"),
    "a buffer for everything": (["ragged_buffer_factor=1"], "from 1 on the buffer holds all tokens"),
    "a buffer for all that arrives": (["ragged_buffer_factor=4", *EXPERT], "from 4 on the buffer holds all tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    words, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        configure(*words)


def test_devices_must_divide_the_experts():
    for key, sentence in {
        "use_ring_of_experts": "a divisor of",
        "shard_exp_on_fsdp": "do not divide",
    }.items():
        words = EXPERT if key == "use_ring_of_experts" else ()
        with pytest.raises(ConfigError, match=f"{sentence} num_experts=6"):
            configure(f"{key}=true", *words, experts=6)


def test_buffers_may_be_larger_than_what_a_device_sends():
    config = configure("ragged_buffer_factor=1.5", *EXPERT)
    assert moe_spec(config, router_spec(config)).buffer_factor == 1.5
