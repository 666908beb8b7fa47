"""Bytes per device against sums by hand, and collectives of a program written by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from maxtext.configs.derive import Devices
from maxtext.layers.context import BuildContext
from maxtext.models.configuration import load
from maxtext.sharding import AxisRules, use_rules
from maxtext.sharding.collectives import Collective, array_bytes, count_collectives
from maxtext.sharding.manual import current
from maxtext.sharding.memory import (
    ActivationSharding,
    MemoryBytes,
    abstract_mesh,
    max_gathered_bytes,
    shard_bytes,
    single_device_rules,
)
from maxtext.trainers.memory.estimate import abstract_context

MESH = AbstractMesh((2, 4), ("fsdp", "tensor"))


def test_bytes_of_shards():
    tree = {
        "a": jax.ShapeDtypeStruct((8, 16), jnp.float32),
        "b": jax.ShapeDtypeStruct((6,), jnp.bfloat16),
    }
    shardings = {
        "a": NamedSharding(MESH, PartitionSpec("fsdp", "tensor")),
        "b": NamedSharding(MESH, PartitionSpec()),
    }
    assert shard_bytes(tree, shardings) == MemoryBytes(device=4 * 4 * 4 + 6 * 2)
    assert shard_bytes(tree, shardings, "int8") == MemoryBytes(device=4 * 4 + 6)


def test_uses_the_shardings_of_leaves():
    spread, host = NamedSharding(MESH, PartitionSpec("tensor")), PartitionSpec(("fsdp", "tensor"))
    tree = [
        jax.ShapeDtypeStruct((8,), jnp.int32, sharding=spread),
        jax.ShapeDtypeStruct(
            (16,), jnp.int32, sharding=NamedSharding(MESH, host, memory_kind="pinned_host")
        ),
        jax.ShapeDtypeStruct(
            (), jax.random.key(0).dtype, sharding=NamedSharding(MESH, PartitionSpec())
        ),
    ]
    assert shard_bytes(tree) == MemoryBytes(device=2 * 4 + 8, host=2 * 4)  # a key is two uint32


def test_llama2_7b_over_64():
    """6,738,415,616 weights, sharded 64 ways along the embedding dimension; Adam has two
    moments.
    """
    config = load(None, ["model_name=llama2-7b"], environ={}, devices=Devices(64))
    context = abstract_context(config)
    state, shardings = context.abstract_state, context.shardings.state
    weights = 4 * 6_738_415_616 // 64
    assert shard_bytes(state.weights, shardings.weights) == MemoryBytes(device=weights)
    moments = shard_bytes(state.opt_state, shardings.opt_state).device
    assert 0 <= moments - 2 * weights <= 16  # step counts


def test_state_on_a_mesh_of_three_axes():
    overrides = [
        "model_name=llama2-7b",
        "ici_fsdp_parallelism=8",
        "ici_tensor_parallelism=4",
        "ici_data_parallelism=2",
    ]
    config = load(None, overrides, environ={}, devices=Devices(64))
    assert dict(abstract_mesh(config).shape)["fsdp"] == 8
    context = abstract_context(config)
    nbytes = shard_bytes(context.abstract_state.weights, context.shardings.state.weights).device
    assert nbytes == pytest.approx(4 * 6_738_415_616 / 32, rel=0.001)  # replicated over data


def activations(*overrides, devices=64):
    config = load(None, ["model_name=llama2-7b", *overrides], environ={}, devices=Devices(devices))
    names = {
        32: "activation_heads",
        4096: "activation_embed",
        11008: "activation_mlp",
        32000: "activation_vocab",
    }
    return ActivationSharding(
        AxisRules.from_config(config, abstract_mesh(config)), 1009, 2048, names
    )


TENSOR = ("ici_fsdp_parallelism=8", "ici_tensor_parallelism=8")
CONTEXT = ("ici_fsdp_parallelism=16", "ici_context_parallelism=4")
# mesh, shape -> number of shards
SHARDS = {
    "rows": ((), (32, 1009, 2048, 4096), 64),
    "tokens": ((), (1009 * 2048 * 2, 11008), 64),
    "tensor_of_the_residual": (TENSOR, (1009, 2048, 4096), 64),
    "heads": (TENSOR, (1009, 2048, 32, 128), 64),
    "hidden": (TENSOR, (1009, 2048, 11008), 64),
    "nothing_to_split": (TENSOR, (1009, 2048, 1), 8),
    "logits": (TENSOR, (1009, 2048, 32000), 64),
    "context": (CONTEXT, (1009, 2048, 32, 128), 64),
    "context_once": (CONTEXT, (1009, 32, 2048, 2048), 64),
    "context_of_tokens": (CONTEXT, (1009 * 2048, 11008), 64),
}


@pytest.mark.parametrize("name", SHARDS)
def test_number_of_shards(name):
    overrides, shape, expected = SHARDS[name]
    assert activations(*overrides).num_shards(shape, batch=64) == expected


def test_bytes_of_an_activation():
    sharding = activations()
    assert sharding.is_activation((32, 1009, 5))
    assert not sharding.is_activation((4096, 32))
    assert (
        sharding.bytes((32, 1009, 2048, 4096), jnp.bfloat16, batch=256) == 32 * 4 * 2048 * 4096 * 2
    )


def test_max_gathered_bytes():
    """One layer of llama2-7b has more weights than the embedding or the head."""
    config = load(None, ["model_name=llama2-7b", *TENSOR], environ={}, devices=Devices(64))
    context = abstract_context(config)
    size = max_gathered_bytes(
        context.rules, context.template.weights, context.template.axes, "bfloat16"
    )
    matrices = 4 * 4096**2 + 3 * 4096 * 11008
    # Weights are not gathered over the tensor axis, which does not shard norms.
    assert size == 2 * (matrices // 8 + 2 * 4096)
    alone = abstract_context(load(None, ["model_name=llama2-7b"], environ={}, devices=Devices(1)))
    assert (
        max_gathered_bytes(alone.rules, alone.template.weights, alone.template.axes, "bfloat16")
        == 0
    )


PROGRAM = """HloModule jit_step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %gather = f32[4,8]{1,0} all-gather(%x), channel_id=1, dimensions={0}
  %fused = f32[2,8]{1,0} fusion(%gather), kind=kLoop, calls=%inner
}

%inner (p0: f32[4,8]) -> f32[2,8] {
  ROOT %scatter = bf16[2,8]{1,0:T(8,128)(2,1)} reduce-scatter(%p0), dimensions={0}, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p1: f32[16]) -> f32[32] {
  ROOT %late = f32[32]{0} all-gather(%p1), dimensions={0}
}

%never (p2: f32[16]) -> f32[16] {
  ROOT %unreached = f32[16]{0} all-reduce(%p2), to_apply=%add
}

ENTRY %main (arg: f32[8]) -> f32[8] {
  %loop = (s32[], f32[4,8]{1,0}) while(%init), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %both = (f32[8]{0}, /*index=1*/bf16[3]{0}) all-reduce(%arg, %three), to_apply=%add
  %start = (f32[8]{0}, f32[16]{0}) all-gather-start(%arg), dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  %async = ((f32[16]), f32[32]) async-start(%done), calls=%wrapped
  %finish = f32[32]{0} async-done(%async), calls=%wrapped
  ROOT %moved = f32[8]{0} collective-permute(%arg), source_target_pairs={{0,1}}
}
"""


def test_counts_collectives():
    assert count_collectives(PROGRAM) == [
        Collective("all-gather", 5 + 1 + 1, 5 * 4 * 8 * 4 + 16 * 4 + 32 * 4),
        Collective("all-reduce", 1, 8 * 4 + 3 * 2),
        Collective("reduce-scatter", 5, 5 * 2 * 8 * 2),
        Collective("collective-permute", 1, 8 * 4),
    ]


CONDITION = """
%c (p3: (s32[], f32[4,8])) -> pred[] {
  %other = s32[]{:T(128)} constant(9)
  %five = s32[]{:T(128)} constant(5)
  %step = s32[]{:T(128)} get-tuple-element(%p3), index=0
  ROOT %less = pred[]{:T(512)} compare(%step, %five), direction=LT, \
metadata={op_name="while/cond/lt"}
}
"""


def test_trip_count_from_the_condition():
    unannotated = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    assert unannotated != PROGRAM
    first, rest = unannotated.split("\n", 1)
    assert count_collectives(first + CONDITION + rest) == count_collectives(PROGRAM)
    counts = {entry.kind: entry.count for entry in count_collectives(unannotated)}
    assert (counts["all-gather"], counts["reduce-scatter"]) == (3, 1)
    assert count_collectives(
        first + CONDITION.replace("direction=LT", "direction=GT") + rest
    ) == count_collectives(unannotated)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[2,3]{1,0}", 24),
        ("(bf16[4], s8[3], pred[5])", 16),
        ("s4[3]", 2),
        ("f8e4m3fn[7]", 7),
        ("f32[]", 4),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("token[]", 0),
        ("c64[2]", 16),
        ("f32[<=6]", 24),
    ],
)
def test_bytes_of_hlo_types(text, size):
    assert array_bytes(text) == size


@pytest.mark.parametrize(("num_devices", "platform"), [(1, "gpu"), (8, None)])
def test_representative_of_several_devices_is_not_a_single_device(num_devices, platform):
    rules = single_device_rules("gpu", num_devices)
    assert BuildContext.from_rules(rules).only_platform == platform
    with use_rules(rules):
        assert current() is None
