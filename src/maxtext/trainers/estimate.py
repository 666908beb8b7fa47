"""Will it fit? The memory of a training step on a target: counted from shapes, and measured on the
compiled program.

Counted: weights, optimizer, gradients and batch from their shards, activations from the residuals
of the loss. Measured: what the compiler says of the program that it made. Other batches and
policies are extrapolated from the one program: the state stays, and all that grows with the batch
grows in proportion.
"""

import contextlib
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
from maxtext.trainers.activations import Kept, kept_by_policy, policy_of
from maxtext.trainers.compile import OutOfDeviceMemory, compile_lowered, lower_train_step
from maxtext.trainers.run_context import RunContext

TRIES = 3  # compilations that confirm a suggestion
# of so many rows one is left out, where more than fit were tried: else the next try may fail by a
# hair
RESERVE = 100


@dataclass(frozen=True)
class Program:
    """A compiled step on one device, in bytes, as the compiler reports it."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take the place of arguments
    temporaries: int  # as reserved, with what lies idle between them
    code: int
    peak: int | None  # arguments and temporaries in use at one time, where the compiler counts them
    host: int
    collectives: list[Collective] | None  # None: they cannot be read
    collectives_error: str = ""  # why not

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Program":
        memory: Any = compiled.memory_analysis()
        peak = getattr(memory, "peak_memory_in_bytes", 0)
        host = ("argument", "output", "temp")
        return cls(
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.generated_code_size_in_bytes,
            peak if peak > memory.argument_size_in_bytes + memory.output_size_in_bytes else None,
            sum(getattr(memory, f"host_{part}_size_in_bytes") for part in host)
            - memory.host_alias_size_in_bytes,
            *read_collectives(compiled),
        )

    @property
    def needed(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def read_collectives(compiled: jax.stages.Compiled) -> tuple[list[Collective] | None, str]:
    """The collectives of a program; or None and the reason, where jax cannot read what a compiler
    of another release than its own made."""
    mismatch = libtpu_mismatch()
    try:
        # XLA logs the stack trace of an error that it also raises.
        with silent_stderr() if mismatch else contextlib.nullcontext():
            return count_collectives(compiled.as_text() or ""), ""
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if mismatch:
            reason = f'{mismatch}, so it cannot read the program ({reason}); pip install "jax[tpu]" installs the latter'
        return None, reason


@dataclass(frozen=True)
class Plan:
    """A policy and a batch, in rows of one micro-batch, with what it is expected to need; and what
    it needs, once it was compiled."""

    policy: str
    rows: int
    per_device: float
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
    gradients: int
    batch: int
    policies: list[Kept]
    working: int  # by arithmetic: beside what is kept, one layer's activations and gathered weights
    batch_pieces: int  # into so many parts the mesh splits a batch
    program: Program | None = None
    refusal: str = ""  # of a compiler that found the target too small

    @property
    def rows(self) -> int:
        return self.config.micro_batch_size_to_train_on

    @property
    def current(self) -> Kept:
        return next(kept for kept in self.policies if kept.policy == policy_of(self.config))

    @property
    def temporaries(self) -> int:
        """Measured, or by arithmetic: the head and the layers are never at work together."""
        if self.program is not None:
            return self.program.temporaries
        return self.gradients + self.current.layers.device + max(self.current.around, self.working)

    @property
    def needed(self) -> int:
        """Bytes of one device."""
        if self.program is not None:
            return self.program.needed
        return self.weights.device + self.optimizer.device + self.batch + self.temporaries

    @property
    def host(self) -> int:
        """Bytes of one device in its host's memory."""
        if self.program is not None and self.program.host:
            return self.program.host
        return self.weights.host + self.optimizer.host + self.current.layers.host

    @property
    def fits(self) -> bool | None:
        """None where the target's memory is not known."""
        if self.refusal:
            return False
        return None if self.target.memory_bytes is None else self.needed <= self.target.memory_bytes

    def growing(self, kept: Kept) -> int:
        """What grows with the batch under a policy, at this batch: all temporaries but the
        gradients.
        """
        grown = self.batch + self.temporaries - min(self.gradients, self.temporaries)
        return max(grown + kept.layers.device - self.current.layers.device, kept.layers.device, 1)

    def plan(self, kept: Kept, rows: int) -> Plan:
        fixed = self.needed - self.growing(self.current)
        expected = fixed + self.growing(kept) * rows // self.rows
        return Plan(kept.policy, rows, rows / self.target.count, expected)

    def largest(self, kept: Kept) -> Plan | None:
        """The largest batch under a policy that should fit, or None."""
        if self.target.memory_bytes is None:
            return None
        left = self.target.memory_bytes - (self.needed - self.growing(self.current))
        rows = left * self.rows // self.growing(kept) // self.batch_pieces * self.batch_pieces
        return self.plan(kept, rows) if rows > 0 else None

    def largest_of_all(self) -> Plan | None:
        """The largest batch of any policy; of policies with the same batch the one that computes
        least again.
        """
        found = [plan for kept in self.preferred() if (plan := self.largest(kept))]
        return max(found, key=lambda plan: plan.rows, default=None)

    def cheapest(self) -> Plan | None:
        """At this batch, the policy that computes least again and should fit."""
        return next(iter(self.promising()), None)

    def promising(self) -> list[Plan]:
        """The policies that should fit at this batch, the one that computes least again first."""
        plans = [self.plan(kept, self.rows) for kept in self.preferred()]
        return [plan for plan in plans if plan.expected <= (self.target.memory_bytes or 0)]

    def preferred(self) -> list[Kept]:
        """Policies to suggest: with the host's memory only where the configuration uses it
        already.
        """
        return [kept for kept in self.policies if not kept.layers.host or self.current.layers.host]


def estimate(config: MaxTextConfig, target: Target, compiling: bool = True) -> Estimate:
    if compiling:
        context = RunContext.from_config(config, target.devices())
    else:
        context = abstract_context(config)
    context.shardings.check()
    policies = kept_by_policy(config, context.rules, target.platform)
    state, shardings = context.abstract_state, context.shardings.state
    weights = shard_bytes(state.weights, shardings.weights)
    everything = next(kept for kept in policies if kept.policy == "none")
    again = 0 if policy_of(config) == "none" else everything.layers.device // len(layers(config))
    counted = Estimate(
        config=config,
        target=target,
        parameters=parameter_count(context.template.weights),
        active=active_count(config, context.template.weights),
        weights=weights,
        optimizer=shard_bytes(
            (state.step, state.optimizer, state.nonfinite_steps),
            (shardings.step, shardings.optimizer, shardings.nonfinite_steps),
        ),
        gradients=shard_bytes(
            state.weights, context.shardings.gradients, config.grad_dtype.value
        ).device,
        batch=shard_bytes(
            (context.abstract_batch(config.global_batch_size_to_train_on), context.abstract_key)
        ).device,
        policies=policies,
        working=again
        + max_gathered_bytes(
            context.rules, context.template.weights, context.template.axes, config.dtype.value
        ),
        batch_pieces=pieces(context.rules),
    )
    return measured(counted, context) if compiling else counted


def measured(counted: Estimate, context: RunContext) -> Estimate:
    """With what the compiler says."""
    lowered = lower_train_step(context, context.config.global_batch_size_to_train_on)
    try:
        return replace(counted, program=Program.of(compile_lowered(context, lowered)))
    except OutOfDeviceMemory as error:
        return replace(counted, refusal=str(error))


def pieces(rules: AxisRules) -> int:
    """Into how many parts the rules split a batch that all devices could share."""
    parts = 1
    for axis in rules.mesh_axes("activation_batch", rules.mesh.size, set()):
        parts *= rules.mesh.shape[axis]
    return parts


def abstract_context(config: MaxTextConfig) -> RunContext:
    """For devices of which only the number is known."""
    mesh: Any = abstract_mesh(config)
    return RunContext.from_rules(config, AxisRules.from_config(config, mesh))


def compiled_as(found: Estimate, plan: Plan) -> Estimate:
    """The estimate of a plan, measured on its own program."""
    config = variant(found.config, found.target, plan)
    factor = plan.rows / found.rows
    there = replace(
        found,
        config=config,
        policies=[scale(kept, factor) for kept in found.policies],
        batch=int(found.batch * factor),
        program=None,
        refusal="",
    )
    return measured(there, RunContext.from_config(config, found.target.devices()))


def confirmed_policy(found: Estimate) -> Plan | None:
    """The first policy that fits when it is compiled, of the few that should."""
    for plan in found.promising()[:TRIES]:
        there = compiled_as(found, plan)
        if there.fits:
            return replace(plan, measured=there.needed)
    return None


def confirmed_batch(found: Estimate) -> Plan | None:
    """The largest batch, compiled; where it needs more than the target has, a smaller one from what
    was learned.
    """
    plan = found.largest_of_all()
    for _ in range(TRIES):
        if plan is None or plan.rows <= 0:
            return None
        there = compiled_as(found, plan)
        if there.fits:
            return replace(plan, measured=there.needed)
        smaller = there.largest(there.current)
        rows = smaller.rows if smaller else plan.rows
        rows = (rows - rows // RESERVE) // found.batch_pieces * found.batch_pieces
        rows = min(rows, plan.rows - found.batch_pieces)
        plan = replace(plan, rows=rows, per_device=rows / found.target.count)
    return None


def scale(kept: Kept, factor: float) -> Kept:
    layers = MemoryBytes(int(kept.layers.device * factor), int(kept.layers.host * factor))
    return replace(kept, layers=layers, around=int(kept.around * factor))


def variant(config: MaxTextConfig, target: Target, plan: Plan) -> Any:
    """The configuration with the policy and the batch of a plan, and all that follows from them."""
    changed = config.model_copy(
        update={"remat_policy": plan.policy, "per_device_batch_size": plan.per_device}
    )
    return changed.model_copy(
        update=derive.derive(changed, derive.Devices(target.count, target.slices))
    )


def plans(found: Estimate, searching: bool = False) -> dict[str, Plan | None]:
    """What to try: the least recomputation at this batch, and the largest batch; compiled if
    `searching`.
    """
    if searching and found.target.memory_bytes is not None:
        return {"policy": confirmed_policy(found), "batch": confirmed_batch(found)}
    return {"policy": found.cheapest(), "batch": found.largest_of_all()}


def shortage(found: Estimate) -> str:
    """By how much the target is too small."""
    return (
        found.refusal
        or f"{format_bytes(found.needed - (found.target.memory_bytes or 0))} a device too much"
    )
