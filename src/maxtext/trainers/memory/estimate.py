"""The memory of a training step on a target: computed from shapes, and measured on the compiled
program.

Computed: weights, optimizer, gradients and batch from their shards, activations from the residuals
of the loss. Measured: what the compiler reports of its program. Other batches and policies are
extrapolated from the one program: the state is constant, and everything else grows in proportion to
the batch.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

import jax

from maxtext.common.extras import libtpu_mismatch
from maxtext.common.hardware import format_bytes
from maxtext.common.log import silent_stderr
from maxtext.configs import derive
from maxtext.configs.types import MaxTextConfig
from maxtext.models.counts import active_count, parameter_count
from maxtext.models.registry import layers
from maxtext.sharding import AxisRules
from maxtext.sharding.collectives import Collective, count_collectives
from maxtext.sharding.memory import MemoryBytes, abstract_mesh, max_gathered_bytes, shard_bytes
from maxtext.sharding.topology import Target
from maxtext.trainers.batch_size import StepBatches
from maxtext.trainers.build import build_run_context, run_context_from_rules
from maxtext.trainers.compilation.compile import (
    OutOfDeviceMemory,
    compile_lowered,
    lower_train_step,
)
from maxtext.trainers.memory.activations import SavedActivations, activations_by_policy, policy_of
from maxtext.trainers.methods import method_of
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.trainable import select

MAX_COMPILATIONS = 3  # to confirm a suggestion
# After a batch that did not fit, 1 / RESERVE of the rows is left out of the next attempt, which
# might otherwise fail by a few bytes.
RESERVE = 100


@dataclass(frozen=True)
class Program:
    """A compiled step on one device, in bytes, as the compiler reports it."""

    arguments: int
    outputs: int
    aliased: int  # outputs that reuse the memory of arguments
    temporaries: int  # as reserved, with unused gaps
    code: int
    peak: int | None  # arguments and temporaries in use at one time, if the compiler reports it
    host: int
    collectives: list[Collective] | None  # None: the program cannot be read
    collectives_error: str = ""  # why not

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Program":
        memory: Any = compiled.memory_analysis()
        peak = getattr(memory, "peak_memory_in_bytes", 0)
        has_peak = peak > memory.argument_size_in_bytes + memory.output_size_in_bytes
        host = sum(
            getattr(memory, f"host_{part}_size_in_bytes") for part in ("argument", "output", "temp")
        )
        program_collectives, collectives_error = read_collectives(compiled)
        return cls(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
            peak=peak if has_peak else None,
            host=host - memory.host_alias_size_in_bytes,
            collectives=program_collectives,
            collectives_error=collectives_error,
        )

    @property
    def needed(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def read_collectives(compiled: jax.stages.Compiled) -> tuple[list[Collective] | None, str]:
    """The collectives of a program; or None and the reason, if jax cannot read the output of a
    compiler of another release."""
    mismatch = libtpu_mismatch()
    try:
        # XLA logs the stack trace of an error that it also raises.
        with silent_stderr() if mismatch else contextlib.nullcontext():
            return count_collectives(compiled.as_text() or ""), ""
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if mismatch:
            reason = (
                f"{mismatch}, so it cannot read the program ({reason}); "
                'pip install "jax[tpu]" installs the latter'
            )
        return None, reason


@dataclass(frozen=True)
class Plan:
    """A policy and a batch, in rows of one microbatch, with the bytes that it is expected to need,
    and those that its compiled program needs."""

    policy: str
    rows: int
    batch_key: str  # the key that sets the rows, and its value
    batch_value: float
    expected: int
    measured: int | None = None


@dataclass(frozen=True)
class Estimate:
    config: MaxTextConfig
    target: Target
    parameters: int
    active: int
    weights: MemoryBytes
    optimizer: MemoryBytes
    reference: MemoryBytes  # frozen weights of another model: a teacher, the reference of DPO
    gradients: int
    batch: int
    policies: list[SavedActivations]
    working: int  # computed: one layer's activations and gathered weights, besides saved ones
    batch_shards: int  # into which the mesh splits a batch
    # Of reinforcement learning, with copies of weights; they are freed before an update.
    rollout_caches: int = 0
    program: Program | None = None
    refusal: str = ""  # the error of a compiler for which the target is too small

    @property
    def rows(self) -> int:
        return self.config.micro_batch_size_to_train_on

    @property
    def batches(self) -> StepBatches:
        return method_of(self.config).batches

    @property
    def batch_key(self) -> str:
        """The key that sets the rows of a microbatch."""
        return self.batches.microbatch_key

    def batch_value(self, rows: int) -> float:
        """The value of `batch_key` for a microbatch of this number of rows."""
        return self.batches.microbatch_value(self.config, rows, self.target.count)

    def possible_rows(self, limit: int) -> int:
        """The largest microbatch of up to `limit` rows that `batch_key` can set; 0 if there is
        none."""
        return self.batches.possible_rows(self.config, limit, self.batch_shards)

    @property
    def current(self) -> SavedActivations:
        return next(saved for saved in self.policies if saved.policy == policy_of(self.config))

    @property
    def temporaries(self) -> int:
        """Measured, or computed: the head and the layers never run at the same time."""
        if self.program is not None:
            return self.program.temporaries
        return self.gradients + self.current.layers.device + max(self.current.outer, self.working)

    @property
    def needed(self) -> int:
        """Bytes of one device, in an update or while rollouts are sampled."""
        state = self.weights.device + self.optimizer.device + self.reference.device
        sampling = state + self.rollout_caches if self.rollout_caches else 0
        if self.program is not None:
            return max(self.program.needed, sampling)
        return max(state + self.batch + self.temporaries, sampling)

    @property
    def host(self) -> int:
        """Bytes of one device in its host's memory."""
        if self.program is not None and self.program.host:
            return self.program.host
        state = self.weights.host + self.optimizer.host + self.reference.host
        return state + self.current.layers.host

    @property
    def fits(self) -> bool | None:
        """None if the target's memory is not known."""
        if self.refusal:
            return False
        return None if self.target.memory_bytes is None else self.needed <= self.target.memory_bytes

    def batch_dependent(self, saved: SavedActivations) -> int:
        """Bytes that grow with the batch under a policy, at this batch: all temporaries but the
        gradients. If the compiled program needs only a part of what the current policy saves as
        traced, other policies need at least the same part of what they save."""
        current = self.batch + self.temporaries - min(self.gradients, self.temporaries)
        traced = self.current.layers.device + self.current.outer
        part = min(current / max(traced, 1), 1)
        least = part * (saved.layers.device + saved.outer)
        return max(current + saved.layers.device - self.current.layers.device, int(least), 1)

    def plan(self, saved: SavedActivations, rows: int) -> Plan:
        fixed = self.needed - self.batch_dependent(self.current)
        expected = fixed + self.batch_dependent(saved) * rows // self.rows
        return Plan(
            saved.policy,
            rows,
            batch_key=self.batch_key,
            batch_value=self.batch_value(rows),
            expected=expected,
        )

    def largest_batch(self, saved: SavedActivations) -> Plan | None:
        """The largest batch under a policy that should fit, or None."""
        if self.target.memory_bytes is None:
            return None
        free = self.target.memory_bytes - (self.needed - self.batch_dependent(self.current))
        rows = self.possible_rows(free * self.rows // self.batch_dependent(saved))
        return self.plan(saved, rows) if rows > 0 else None

    def largest_batch_of_all(self) -> Plan | None:
        """The largest batch of any policy; of policies with the same batch the one that recomputes
        least."""
        plans = [plan for saved in self.candidates() if (plan := self.largest_batch(saved))]
        return max(plans, key=lambda plan: plan.rows, default=None)

    def least_recompute(self) -> Plan | None:
        """At this batch, the policy that recomputes least and should fit."""
        return next(iter(self.fitting_plans()), None)

    def fitting_plans(self) -> list[Plan]:
        """The policies that should fit at this batch, the one that recomputes least first."""
        plans = [self.plan(saved, self.rows) for saved in self.candidates()]
        return [plan for plan in plans if plan.expected <= (self.target.memory_bytes or 0)]

    def candidates(self) -> list[SavedActivations]:
        """Policies to suggest: those that offload to the host only if the current one does."""
        return [
            saved for saved in self.policies if not saved.layers.host or self.current.layers.host
        ]


def estimate_memory(config: MaxTextConfig, target: Target, compiling: bool = True) -> Estimate:
    if compiling:
        context = build_run_context(config, target.devices())
    else:
        context = abstract_context(config)
    context.shardings.check()
    policies = activations_by_policy(config, context.rules, target.platform)
    state, shardings = context.abstract_state, context.shardings.state
    all_activations = next(saved for saved in policies if saved.policy == "none").layers.device
    layer_activations = 0 if policy_of(config) == "none" else all_activations // len(layers(config))
    computed = Estimate(
        config=config,
        target=target,
        parameters=parameter_count(context.template.weights),
        active=active_count(config, context.template.weights),
        weights=shard_bytes(state.weights, shardings.weights),
        optimizer=shard_bytes(
            (state.step, state.opt_state, state.nonfinite_steps),
            (shardings.step, shardings.opt_state, shardings.nonfinite_steps),
        ),
        reference=shard_bytes(state.reference, shardings.reference),
        gradients=shard_bytes(
            select(state.weights, context.trained),
            select(context.shardings.gradients, context.trained),
            config.grad_dtype.value,
        ).device,
        batch=shard_bytes(
            (context.abstract_batch(config.global_batch_size_to_train_on), context.abstract_key)
        ).device,
        policies=policies,
        working=layer_activations
        + max_gathered_bytes(
            context.rules, context.template.weights, context.template.axes, config.dtype.value
        ),
        batch_shards=batch_shards(context.rules),
        rollout_caches=method_of(config).rollout_bytes(context),
    )
    return with_program(computed, context) if compiling else computed


def with_program(estimate: Estimate, context: RunContext) -> Estimate:
    """The estimate, with what the compiler reports."""
    lowered = lower_train_step(context, context.config.global_batch_size_to_train_on)
    try:
        return replace(estimate, program=Program.of(compile_lowered(context, lowered)))
    except OutOfDeviceMemory as error:
        return replace(estimate, refusal=str(error))


def batch_shards(rules: AxisRules) -> int:
    """The number of shards of a batch that divides over all devices."""
    axes = rules.mesh_axes("activation_batch", rules.mesh.size, set())
    return math.prod(rules.mesh.shape[axis] for axis in axes)


def abstract_context(config: MaxTextConfig) -> RunContext:
    """For devices of which only the number is known."""
    mesh: Any = abstract_mesh(config)
    return run_context_from_rules(config, AxisRules.from_config(config, mesh))


def compile_plan(estimate: Estimate, plan: Plan) -> Estimate:
    """The estimate of a plan, measured on its own program."""
    config = with_batch(estimate.config, estimate.target, plan.policy, plan.rows)
    factor = plan.rows / estimate.rows
    scaled = replace(
        estimate,
        config=config,
        policies=[scale_activations(saved, factor) for saved in estimate.policies],
        batch=int(estimate.batch * factor),
        program=None,
        refusal="",
    )
    return with_program(scaled, build_run_context(config, estimate.target.devices()))


def confirm_policy(estimate: Estimate) -> Plan | None:
    """The first of the policies that should fit whose compiled program does."""
    for plan in estimate.fitting_plans()[:MAX_COMPILATIONS]:
        compiled = compile_plan(estimate, plan)
        if compiled.fits:
            return replace(plan, measured=compiled.needed)
    return None


def confirm_batch(estimate: Estimate) -> Plan | None:
    """The largest batch, compiled; if it does not fit, a smaller one, extrapolated from its
    program."""
    plan = estimate.largest_batch_of_all()
    for _ in range(MAX_COMPILATIONS):
        if plan is None or plan.rows <= 0:
            return None
        compiled = compile_plan(estimate, plan)
        if compiled.fits:
            return replace(plan, measured=compiled.needed)
        smaller = compiled.largest_batch(compiled.current)
        rows = smaller.rows if smaller else plan.rows
        rows = estimate.possible_rows(min(rows - rows // RESERVE, plan.rows - 1))
        plan = replace(plan, rows=rows, batch_value=estimate.batch_value(rows))
    return None


def scale_activations(saved: SavedActivations, factor: float) -> SavedActivations:
    layers = MemoryBytes(int(saved.layers.device * factor), int(saved.layers.host * factor))
    return replace(saved, layers=layers, outer=int(saved.outer * factor))


def with_batch(config: MaxTextConfig, target: Target, policy: str, rows: int) -> MaxTextConfig:
    """The configuration with this policy and microbatches of `rows` rows, and its derived
    values."""
    batch = method_of(config).batches.with_microbatch(config, rows, target.count)
    changed = config.model_copy(update={"remat_policy": policy, **batch})
    return changed.model_copy(
        update=derive.derive(changed, derive.Devices(target.count, target.slices))
    )


def suggest_plans(estimate: Estimate, searching: bool = False) -> dict[str, Plan | None]:
    """The least recomputation at this batch, and the largest batch; compiled if `searching`."""
    if searching and estimate.target.memory_bytes is not None:
        return {"policy": confirm_policy(estimate), "batch": confirm_batch(estimate)}
    return {"policy": estimate.least_recompute(), "batch": estimate.largest_batch_of_all()}


def describe_shortage(estimate: Estimate) -> str:
    """Says by how much the target is too small."""
    excess = estimate.needed - (estimate.target.memory_bytes or 0)
    return estimate.refusal or f"{format_bytes(excess)} a device too much"
