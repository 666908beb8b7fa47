"""Activations that policies save and FLOPs that they recompute, against sums by hand; and
extrapolations against compiled programs."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from maxtext.cli.estimate import show, to_json
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.sharding.memory import single_device_rules
from maxtext.sharding.topology import Target, find_target
from maxtext.trainers.memory import estimate as estimates
from maxtext.trainers.memory.activations import (
    activations_by_policy,
    matmul_flops,
    policy_of,
    trace,
    with_policy,
)
from maxtext.trainers.memory.estimate import (
    Estimate,
    Program,
    abstract_context,
    describe_shortage,
    estimate_memory,
    suggest_plans,
    with_batch,
)
from tests.forked import run_python

LAYERS, ROWS, LENGTH, WIDTH, HEADS, GROUPS, HEAD, INNER, VOCAB = 2, 4, 32, 48, 4, 2, 8, 80, 112
MODEL = [
    f"base_num_decoder_layers={LAYERS}", f"base_emb_dim={WIDTH}", f"base_num_query_heads={HEADS}",
    f"head_dim={HEAD}", f"base_num_kv_heads={GROUPS}", f"base_mlp_dim={INNER}",
    f"vocab_size={VOCAB}", f"max_target_length={LENGTH}", f"per_device_batch_size={ROWS}",
    "dataset_type=synthetic", "attention=dot_product", "enable_tensorboard=false",
]  # fmt: skip
TOKENS = ROWS * LENGTH


def configure(*overrides, devices=1):
    return load(None, [*MODEL, *overrides], environ={}, devices=Devices(devices))


@pytest.fixture(scope="module")
def policies():
    config = configure()
    return {
        saved.policy: saved
        for saved in activations_by_policy(config, abstract_context(config).rules)
    }


# bfloat16 values that a layer saves per token, besides its input
PROJECTIONS = (HEADS + 2 * GROUPS) * HEAD
SAVED = {
    "full": 0,
    "save_out_proj": WIDTH,
    "save_qkv_proj": PROJECTIONS,
    "save_dot_except_mlp": PROJECTIONS + WIDTH,
    "save_dot_with_context_except_mlp": PROJECTIONS + WIDTH + HEADS * HEAD,
    "minimal": PROJECTIONS + WIDTH + 2 * INNER,
    "minimal_with_context": PROJECTIONS + WIDTH + 2 * INNER + HEADS * HEAD,
}


@pytest.mark.parametrize("policy", SAVED)
@pytest.mark.slow
def test_bytes_saved_by_a_policy(policies, policy):
    saved = policies[policy].layers
    # The layers' input; positions, and rotations that all layers share, are less than a number a
    # token and layer.
    assert saved.device == pytest.approx(
        2 * LAYERS * TOKENS * (WIDTH + SAVED[policy]), abs=2 * LAYERS * TOKENS * 2
    )
    assert saved.host == 0


def test_bytes_offloaded_to_the_host(policies):
    assert policies["qkv_proj_offloaded"].layers.host == 2 * LAYERS * TOKENS * PROJECTIONS
    assert policies["minimal_offloaded"].layers.host == 2 * LAYERS * TOKENS * SAVED["minimal"]
    assert policies["minimal_offloaded"].layers.device == policies["full"].layers.device


def test_recomputed_flops(policies):
    """FLOPs of a layer per token: projections, attention logits and weighted values, MLP. The down
    projection of the MLP is not needed again."""
    project = 2 * WIDTH * PROJECTIONS
    attend = 2 * 2 * LENGTH * HEADS * HEAD
    out = 2 * HEADS * HEAD * WIDTH
    up = 2 * WIDTH * 2 * INNER
    forward = LAYERS * (project + attend + out + up + up // 2) + 2 * WIDTH * VOCAB
    recomputed = {name: saved.recompute * forward / LAYERS for name, saved in policies.items()}
    assert recomputed["none"] == 0
    assert recomputed["full"] == pytest.approx(project + attend + out + up, rel=1e-6)
    assert recomputed["save_out_proj"] == pytest.approx(project + attend + up, rel=1e-6)
    assert recomputed["minimal"] == pytest.approx(attend, rel=1e-6)
    assert recomputed["minimal_with_context"] == pytest.approx(attend / 2, rel=1e-6)
    assert next(iter(policies)) == "none"
    assert list(policies)[-1] == "full"


def test_flops_of_a_step_are_three_times_the_forward(policies):
    config = configure("remat_policy=none")
    forward = LAYERS * (
        2 * WIDTH * PROJECTIONS
        + 4 * LENGTH * HEADS * HEAD
        + 2 * HEADS * HEAD * WIDTH
        + 6 * WIDTH * INNER
    )
    forward += 2 * WIDTH * VOCAB
    traced = trace(with_policy(config, "none"), single_device_rules("cpu", 1))
    assert matmul_flops(traced.jaxpr) == 3 * forward * 1009 * LENGTH


@pytest.mark.slow
def test_devices_share_activations():
    config = configure(devices=8)
    alone = configure("gradient_accumulation_steps=3")
    eight = {
        saved.policy: saved
        for saved in activations_by_policy(config, abstract_context(config).rules)
    }
    one = {
        saved.policy: saved for saved in activations_by_policy(alone, abstract_context(alone).rules)
    }
    for name in (
        "full",
        "minimal",
        "none",
    ):  # a device has its own rows, and one micro-batch at a time
        assert eight[name].device == one[name].device


@pytest.mark.parametrize(
    ("override", "name"),
    [("remat_policy=minimal_flash", "minimal_with_context"), ("remat_policy=none", "none")],
)
def test_names_of_policies(override, name):
    assert policy_of(configure(override)) == name


@pytest.mark.slow
def test_custom_policies_are_listed():
    config = configure("remat_policy=custom", "out_proj=device")
    policies = {
        saved.policy: saved
        for saved in activations_by_policy(config, abstract_context(config).rules)
    }
    assert policies["custom"].layers.device == policies["save_out_proj"].layers.device


# A target's memory decides what is suggested.


@pytest.fixture(scope="module")
def arithmetic():
    return estimate_memory(configure(devices=64), find_target("v5p-128"), compiling=False)


def with_memory(result: Estimate, memory: int | None) -> Estimate:
    return replace(result, target=Target("it", "tpu", "TPU v5p", 64, 1, memory))


def test_parts_add_up(arithmetic):
    saved = arithmetic.current
    assert arithmetic.temporaries == arithmetic.gradients + saved.layers.device + max(
        saved.outer, arithmetic.working
    )
    state = arithmetic.weights.device + arithmetic.optimizer.device
    assert arithmetic.needed == state + arithmetic.batch + arithmetic.temporaries
    assert arithmetic.batch == 6 * 4 * TOKENS + 8
    assert arithmetic.fits


def test_suggestions_fit_and_no_better_one_does(arithmetic):
    for memory in (arithmetic.needed - 1, arithmetic.needed, 3 * arithmetic.needed, 2**30):
        result = with_memory(arithmetic, memory)
        assert result.fits == (result.needed <= memory)
        largest = result.largest_batch_of_all()
        if largest is not None:
            assert largest.expected <= memory
            assert largest.rows % 64 == 0
            saved = next(saved for saved in result.policies if saved.policy == largest.policy)
            assert result.plan(saved, largest.rows + 64).expected > memory
        cheapest = result.least_recompute()
        if cheapest is not None:
            order = [saved.policy for saved in result.candidates()]
            for better in order[: order.index(cheapest.policy)]:
                saved = next(saved for saved in result.policies if saved.policy == better)
                assert result.plan(saved, result.rows).expected > memory


def test_a_target_smaller_than_the_state(arithmetic):
    result = with_memory(arithmetic, arithmetic.weights.device)
    assert suggest_plans(result) == {"policy": None, "batch": None}
    assert "a device too much" in describe_shortage(result)


def test_unknown_memory(arithmetic):
    result = with_memory(arithmetic, None)
    assert result.fits is None
    assert suggest_plans(result) == {"policy": None, "batch": None}


def test_offloading_is_suggested_only_to_configurations_that_offload(arithmetic):
    assert all(not saved.layers.host for saved in arithmetic.candidates())
    offloading = replace(
        arithmetic,
        config=arithmetic.config.model_copy(update={"remat_policy": "minimal_offloaded"}),
    )
    assert any(saved.layers.host for saved in offloading.candidates())


def test_needed_memory_of_a_program():
    program = Program(100, 90, 80, 1000, 5, None, 0, [])
    assert program.needed == 100 + 90 - 80 + 1000 + 5


def test_a_program_that_needs_less_than_its_policy_saves(arithmetic):
    config = arithmetic.config.model_copy(update={"remat_policy": "none"})
    result = replace(arithmetic, config=config)
    state = result.weights.device + result.optimizer.device
    temporaries = result.gradients + result.current.layers.device // 2
    result = replace(result, program=Program(state, state, state, temporaries, 0, None, 0, []))
    needs = {saved.policy: result.plan(saved, result.rows).expected for saved in result.policies}
    assert needs["none"] == result.needed == state + temporaries
    assert state < needs["full"] < needs["minimal"] < needs["none"]
    assert result.plan(result.current, 2 * result.rows).expected > needs["none"]


COMPARE = """
import json, sys
from maxtext.models.configuration import load
from maxtext.configs.derive import Devices
from maxtext.sharding.topology import find_target
from maxtext.trainers.memory.estimate import compile_plan, estimate_memory

target = find_target("cpu:8")
config = load(None, sys.argv[1:], environ={}, devices=Devices(target.count))
result = estimate_memory(config, target)
program = result.program
by_policy = {saved.policy: saved for saved in result.policies}
there = {}
for policy, rows in (("full", 3 * result.rows), ("minimal", result.rows)):
    plan = result.plan(by_policy[policy], rows)
    there[policy] = [plan.expected, compile_plan(result, plan).needed]
print(json.dumps({
    "weights": result.weights.device, "optimizer": result.optimizer.device, "batch": result.batch,
    "arguments": program.arguments, "aliased": program.aliased, "plans": there,
    "collectives": [[one.kind, one.count, one.bytes] for one in program.collectives],
}))
"""


@pytest.fixture(scope="module")
def compiled():
    packed = [
        override for override in MODEL if not override.startswith("dataset_type")
    ]  # so that segments are read
    overrides = [
        *packed,
        "dataset_type=grain",
        "ici_fsdp_parallelism=4",
        "ici_tensor_parallelism=2",
    ]
    result = run_python("-c", COMPARE, *overrides, environment={})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_arguments_of_the_program_are_the_state_and_the_batch(compiled):
    """To the byte. A step does not read targets_position, nor the key, without dropout."""
    field = (compiled["batch"] - 8) // 6
    assert compiled["arguments"] == compiled["weights"] + compiled["optimizer"] + 5 * field
    assert (
        compiled["aliased"] == compiled["weights"] + compiled["optimizer"]
    )  # the state is given and taken


@pytest.mark.slow
def test_extrapolations_against_other_programs(compiled):
    for expected, needed in compiled["plans"].values():
        assert expected == pytest.approx(needed, rel=0.3)


@pytest.mark.slow
def test_a_sharded_program_has_collectives(compiled):
    kinds = {kind: (count, size) for kind, count, size in compiled["collectives"]}
    assert (
        kinds["all-gather"][0] >= 2 * 7 * LAYERS
    )  # each matrix of a layer, forwards and backwards
    assert all(count > 0 and size > 0 for count, size in kinds.values())


class Unreadable:
    """A program of a libtpu that does not match jax: as_text fails like jax 0.10.2 with libtpu
    0.0.51."""

    def memory_analysis(self):
        sizes = ("argument", "output", "alias", "temp", "generated_code")
        sizes += ("host_argument", "host_output", "host_temp", "host_alias")
        return SimpleNamespace(
            **{f"{part}_size_in_bytes": 8 * number for number, part in enumerate(sizes)}
        )

    def as_text(self):
        os.write(2, b"*** Begin stack trace ***")
        raise jax.errors.JaxRuntimeError(
            "INTERNAL: RET_CHECK failure (hlo_instruction.cc:390) async-update\nmore"
        )


@pytest.mark.slow
def test_a_program_whose_text_cannot_be_read(monkeypatch, capfd):
    """The memory is reported, and the reason why the collectives are not."""
    monkeypatch.setattr(
        estimates,
        "libtpu_mismatch",
        lambda: "libtpu 9 is installed, but jax 1 requires libtpu 8",
    )
    program = Program.of(Unreadable())
    assert program.collectives is None
    assert program.needed == 0 + 8 - 16 + 24 + 32
    result = replace(
        estimate_memory(configure(), find_target("cpu"), compiling=False), program=program
    )
    show(result, {"policy": None, "batch": None})
    out, err = capfd.readouterr()
    shown = " ".join(out.split())
    assert "stack trace" not in err
    assert 'pip install "jax[tpu]"' in shown
    assert (
        "collectives a step cannot be read: libtpu 9 is installed, but jax 1 requires libtpu 8"
        in shown
    )
    assert "RET_CHECK failure (hlo_instruction.cc:390) async-update)" in shown
    assert "more" not in program.collectives_error
    assert to_json(result, {})["compiled"]["collectives"] is None


def configure_rl(*overrides):
    keys = [
        "use_grpo=true", "dataset_type=hf", "packing=false", "batch_size=12", "num_generations=5",
        "max_prefill_predict_length=8", "kv_cache_buffer=4", "max_num_seqs=11", "grpo_beta=0",
        "num_test_batches=0", "dtype=bfloat16",
    ]  # fmt: skip
    model = [key for key in MODEL if not key.startswith("dataset_type")]
    return load(None, [*model, *keys, *overrides], environ={}, devices=Devices(1))


@pytest.fixture(scope="module")
def of_rollouts():
    config = configure_rl("train_micro_batch_size=2")
    return estimate_memory(config, find_target("v5p:1x1x1"), compiling=False)


@pytest.mark.slow
def test_caches_of_rollouts_count_while_they_are_sampled(of_rollouts):
    keys_and_values = 2 * GROUPS * HEAD * LAYERS * 2  # bytes of a token, in bfloat16
    assert of_rollouts.rollout_caches == 11 * (LENGTH + 4) * keys_and_values
    state = of_rollouts.weights.device + of_rollouts.optimizer.device
    larger = replace(of_rollouts, rollout_caches=10**12)
    assert larger.needed == state + 10**12
    assert of_rollouts.needed == replace(of_rollouts, rollout_caches=0).needed


@pytest.mark.slow
def test_microbatches_of_rollouts_have_whole_groups_and_divide_the_prompts(of_rollouts, capsys):
    assert of_rollouts.rows == 2 * 5
    # Sizes that divide 12 prompts; 2 of them now
    expected = {1: 2, 2.3: 4, 5: 6, 10**6: 12}
    for factor, size in expected.items():
        result = replace(with_memory(of_rollouts, 0), rollout_caches=0)
        free = result.batch_dependent(result.current) * factor
        fixed = result.needed - result.batch_dependent(result.current)
        result = with_memory(result, int(fixed + free))
        plan = result.largest_batch(result.current)
        assert (plan.batch_key, plan.batch_value) == ("train_micro_batch_size", size)
        config = configure_rl(f"train_micro_batch_size={plan.batch_value:g}")
        assert config.micro_batch_size_to_train_on == plan.rows
        applied = with_batch(of_rollouts.config, of_rollouts.target, plan.policy, plan.rows)
        assert applied.micro_batch_size_to_train_on == plan.rows
    plans = {"policy": None, "batch": plan}
    show(of_rollouts, plans)
    shown = capsys.readouterr().out
    assert f"10 x {LENGTH} tokens a device" in shown
    assert "largest batch: train_micro_batch_size=12" in shown
    assert to_json(of_rollouts, plans)["train_micro_batch_size"] == 2
    assert "per_device_batch_size" not in shown


def test_weights_of_a_reference_count_once():
    model = [key for key in MODEL if not key.startswith("dataset_type")]
    keys = ["use_dpo=true", "dataset_type=hf", "packing=false"]
    config = load(None, [*model, *keys], environ={}, devices=Devices(1))
    estimate = estimate_memory(config, find_target("v5p:1x1x1"), compiling=False)
    assert estimate.weights.device == 4 * estimate.parameters
    norms = (2 * config.num_decoder_layers + 1) * config.emb_dim  # as in the policy, float32
    assert estimate.reference.device == 2 * (estimate.parameters + norms)  # others in bfloat16
