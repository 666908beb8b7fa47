"""Mixtures of experts on eight devices, in a subprocess: outputs, gradients and collectives of each
layout.
"""

import json
import math

import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.models.common import moe_spec, router_spec
from maxtext.models.configuration import load
from tests.compiling import cpu_devices
from tests.forked import run_python
from tests.layers.eight_experts import (
    BATCH,
    CASES,
    EMBED_DIM,
    EXPERTS,
    FURTHER,
    HIDDEN_DIM,
    LENGTH,
    PLAIN,
)

# Elements of x and of a weight, unsharded.
TOKENS, WEIGHT = BATCH * LENGTH * EMBED_DIM, EXPERTS * EMBED_DIM * HIDDEN_DIM
LOGITS = BATCH * LENGTH * EXPERTS


def parameters(names):
    """For pytest.mark.parametrize."""
    return [
        pytest.param(name, marks=pytest.mark.exhaustive if name in FURTHER else ())
        for name in names
    ]


@pytest.fixture(scope="module")
def eight(request):
    """The results of all cases but the FURTHER ones that this session does not test."""
    tested = {
        item.callspec.params.get("name")
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }
    names = [name for name in CASES if name in tested or name not in FURTHER]
    done = run_python("-m", "tests.layers.eight_experts", *names, environment=cpu_devices(8))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters(CASES))
def test_results_match_one_device(eight, name):
    result = eight["cases"][name]
    # Values that differ in the last bit may round to different fp8 values.
    tolerance = 0.02 if name.startswith("fp8") else 2e-6
    wrong = {tensor: error for tensor, error in result["errors"].items() if not error < tolerance}
    assert not wrong
    assert result["smallest"] > 0.1  # nothing is compared with zeros
    assert len(result["errors"]) >= 5
    assert (result["dropped"] > 5) == name.startswith("bound")


def sizes(eight, name, kind):
    collectives = eight["cases"][name]["collectives"]
    return {size for collective, size in collectives if collective == kind}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", parameters(name for name in CASES if not name.startswith(("dense", "dropping")))
)
def test_no_unnecessary_gathers(eight, name):
    """Tokens are gathered only from devices that share them, weights only over axes that also shard
    tokens.
    """
    axes, options = CASES[name]
    if options.get("ragged"):
        return  # emulated by gathers
    owners = axes.get("expert", 1) * (axes["fsdp"] if name == "two expert axes" else 1)
    rows = math.prod(axes.get(axis, 1) for axis in ("data", "fsdp", "fsdp_transpose", "expert"))
    if options.get("batch"):
        rows = 1
    elif options.get("spec", PLAIN).ring:
        rows //= owners
    if name == "6 experts on 4 devices":  # experts cannot be sharded, so all devices have all
        owners = 1
    gathered = sizes(eight, name, "all-gather")
    if rows > 1:
        assert not {TOKENS, LOGITS} & gathered
    assert max(gathered, default=0) <= max(
        TOKENS // rows, WEIGHT // owners // axes.get("tensor", 1)
    )


@pytest.mark.slow
def test_collectives_of_each_layout(eight):
    all_to_all = {
        "expert",
        "fsdp x expert",
        "expert x tensor",
        "biases",
        "weighed input",
        "two expert axes",
    }
    for name in all_to_all:
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
    assert sizes(eight, "data", "all-reduce") == {WEIGHT}  # gradients of the weights
    for name in ("fsdp", "fsdp_transpose", "context"):
        assert WEIGHT in sizes(eight, name, "all-gather")
        assert sizes(eight, name, "reduce-scatter") == {WEIGHT // 8}
    for name in ("tensor", "tensor_sequence"):
        assert TOKENS // 8 in sizes(eight, name, "reduce-scatter")
        assert (
            max(sizes(eight, name, "all-gather")) == TOKENS
        )  # by embedding or length, and no kernel
    assert WEIGHT not in sizes(eight, "expert", "all-gather") | sizes(eight, "expert", "all-reduce")
    # Four devices gather the tokens that they share, half of the batch; the sum is scattered.
    assert TOKENS // 2 in sizes(eight, "ring", "all-gather")
    assert TOKENS // 8 in sizes(eight, "ring", "reduce-scatter")
    # Two stages: first over one axis, then over the other.
    assert {WEIGHT // 2, WEIGHT} <= sizes(eight, "two stages", "all-gather")


@pytest.mark.slow
def test_named_intermediates_are_saved(eight):
    assert eight["saved"]["nothing"] - eight["saved"]["tags"] == 3  # two branches and the output


@pytest.mark.slow
def test_ragged_all_to_all_lowers_for_tpus_and_gpus(eight):
    assert eight["lowered"]["tpu"] == eight["lowered"]["cuda"] > 1


MIXTRAL = ["decoder_block=mixtral", "num_experts_per_tok=2", "per_device_batch_size=1"]


def configure(*overrides, experts=8):
    return load(
        None, [*MIXTRAL, f"num_experts={experts}", *overrides], environ={}, devices=Devices(8)
    )


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
    key, overrides = SPLIT[field]
    for config, value in ((configure(*overrides), False), (configure(key, *overrides), True)):
        assert getattr(moe_spec(config, router_spec(config)), field) is value


REFUSED = {
    "a ring of one": (["use_ring_of_experts=true"], "use_ring_of_experts=true would do nothing"),
    "a ring of dense experts": (
        ["use_ring_of_experts=true", "sparse_matmul=false", *EXPERT],
        "it needs sparse_matmul=true",
    ),
    "one stage": (
        ["moe_fsdp_use_two_stage_all_gather=true"],
        "ici_fsdp_transpose_parallelism above 1",
    ),
    "fsdp of one": (
        ["shard_exp_on_fsdp=true", "ici_fsdp_parallelism=1", "ici_data_parallelism=8"],
        "would do nothing",
    ),
    "fsdp beside expert": (
        ["shard_exp_on_fsdp=true", *EXPERT],
        "leaves the mesh axis 'expert' without experts",
    ),
    "a buffer for everything": (
        ["ragged_buffer_factor=1"],
        "a buffer factor of 1 already holds all tokens",
    ),
    "a buffer for all that arrives": (
        ["ragged_buffer_factor=4", *EXPERT],
        "a buffer factor of 4 already holds all tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_useless_settings_are_refused(name):
    overrides, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        configure(*overrides)


def test_devices_must_divide_the_experts():
    for key, message in {
        "use_ring_of_experts": "a divisor of",
        "shard_exp_on_fsdp": "do not divide",
    }.items():
        overrides = EXPERT if key == "use_ring_of_experts" else ()
        with pytest.raises(ConfigError, match=f"{message} num_experts=6"):
            configure(f"{key}=true", *overrides, experts=6)


def test_buffer_may_be_larger_than_local_rows():
    config = configure("ragged_buffer_factor=1.5", *EXPERT)
    assert moe_spec(config, router_spec(config)).buffer_factor == 1.5
