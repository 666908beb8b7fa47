"""Lowering and compiling of the train step and the eval step."""

import contextlib
import os
import re
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json, Tree
from maxtext.optimizers import learning_rate_schedule
from maxtext.sharding import use_rules
from maxtext.sharding.explicit import with_explicit_sharding
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.shardings import with_shardings
from maxtext.trainers.step import STOP_FLAG, make_eval_step, make_train_step

# The keys are platforms. On CPUs, LLVM at optimization level 1 compiles a step in three quarters
# of the time, and the step runs as fast. XLA_FLAGS override these options.
COMPILER_OPTIONS: dict[str, Json] = {"cpu": {"xla_backend_optimization_level": 1}}
# XLA may leave out a rounding to bfloat16, and does so in other places of a forward pass that is
# differentiated than of one that is not: a policy would differ from an equal reference. On CPUs
# YNNPACK also does so, in the elementwise operations that are fused with a matmul.
EXACT_ROUNDING = {"xla_allow_excess_precision": False}
ROUNDING_OPTIONS: dict[str, Json] = {
    "cpu": EXACT_ROUNDING
    | {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"},
    "gpu": EXACT_ROUNDING,
}
# in the error message of the TPU compiler
SHORTAGE = re.compile(r"Used \S+ of \S+ \w+\. Exceeded .*? by [\d.]+\w+")


class OutOfDeviceMemory(ConfigError):
    """The step needs more memory than its devices have."""


def compile_train_step(context: RunContext, rows: int) -> jax.stages.Compiled:
    return compile_lowered(context, lower_train_step(context, rows))


def lower_train_step(context: RunContext, rows: int) -> jax.stages.Lowered:
    """The train step for batches of `rows` rows. It donates the state."""
    shardings = context.shardings
    step = make_train_step(
        context.objective,
        context.optimizer,
        schedule=learning_rate_schedule(context.config),
        constrain_gradients=shardings.constrain_gradients,
    )
    state = with_shardings(context.abstract_state, shardings.state)
    batch = context.abstract_batch(rows)
    if shardings.spans_processes:
        batch[STOP_FLAG] = jax.ShapeDtypeStruct(
            (context.rules.mesh.size,), jnp.int32, sharding=shardings.one_per_device
        )
    arguments = state, batch, context.abstract_key
    if is_explicit(context):
        step = with_explicit_sharding(step, jax.tree.map(lambda leaf: leaf.sharding, arguments))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings.state, shardings.replicated))
    return lower(context, jitted, *arguments)


def compile_eval_step(context: RunContext, rows: int) -> jax.stages.Compiled:
    shardings = context.shardings
    step = jax.jit(make_eval_step(context.objective), out_shardings=shardings.replicated)
    state = with_shardings(context.abstract_state, shardings.state)
    batch = context.abstract_batch(rows, is_training=False)
    lowered = lower(context, step, state.weights, state.reference, batch)
    return lowered.compile(default_options(context))


def lower(context: RunContext, step: Any, *arguments: Tree) -> jax.stages.Lowered:
    mesh = context.rules.mesh
    with (
        use_rules(context.program_rules),
        jax.set_mesh(mesh) if is_explicit(context) else contextlib.nullcontext(),
        jax.default_matmul_precision(context.config.matmul_precision.value),
    ):
        return step.lower(*arguments)


def is_explicit(context: RunContext) -> bool:
    return context.config.shard_mode.value == "explicit"


def compile_lowered(context: RunContext, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The train step, compiled with compile_xla_flags. Raises OutOfDeviceMemory if the compiler
    reports that it does not fit, and ConfigError if XLA rejects a flag."""
    flags = compiler_options(context.config.compile_xla_flags)
    try:
        return lowered.compile({**default_options(context), **flags})
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())
        if message.startswith("RESOURCE_EXHAUSTED"):
            shortage = SHORTAGE.search(message)
            raise OutOfDeviceMemory(
                f"the compiler cannot fit the step: {shortage[0] if shortage else message[:200]}"
            ) from error
        if flags and ("option" in message.lower() or any(flag in message for flag in flags)):
            shown = context.config.compile_xla_flags
            raise ConfigError(
                f"compile_xla_flags={shown!r}: XLA refuses it: {message[:300]}"
            ) from error
        raise


def default_options(context: RunContext) -> Json:
    """COMPILER_OPTIONS of the platform, with its ROUNDING_OPTIONS for a policy and its reference or
    a student and its teacher, without those that XLA_FLAGS sets."""
    given = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    platform = platform_of(context)
    options = COMPILER_OPTIONS.get(platform, {})
    if context.objective.compares_passes:
        options = options | ROUNDING_OPTIONS.get(platform, {})
    return {name: value for name, value in options.items() if f"--{name}" not in given}


def compiler_options(flags: str) -> dict[str, str]:
    """`--xla_a=b --xla_c=d` as {"xla_a": "b", "xla_c": "d"}."""
    options = {}
    for flag in flags.split():
        name, equals, value = flag.partition("=")
        if not name.startswith("--xla") or not equals or not value:
            raise ConfigError(f"compile_xla_flags: {flag!r} is not of the form --xla_name=value")
        options[name.removeprefix("--")] = value
    return options


def platform_of(context: RunContext) -> str:
    return context.rules.mesh.devices.flat[0].platform
