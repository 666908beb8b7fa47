"""The sparse method of a mixture of experts: assignments are sorted by expert for grouped matmuls.

Shapes: B batch, S sequence, T = B·S tokens, k choices of a token, N = T·k assignments, X experts, E
embed_dim, M hidden_dim of an expert, P devices that share the experts; with several devices, the
tokens of one device.

On a mesh, each device sorts its own tokens, and mesh axes have these roles:
- token axes shard batch or length. Weights that they also shard (fsdp) are gathered for the
  matmul.
- expert axes shard the experts, as `exp` and `activation_exp` do. Rows are sent to the owner of
  their expert and back (`kernels/all_to_all.py`). With `ring`, or if an expert axis does not shard
  tokens, the owners all-gather their tokens instead, multiply by their own experts, and the sums
  are reduce-scattered.
- hidden axes shard the experts' hidden_dim and not the tokens (tensor parallelism). Each device
  computes its part of hidden_dim, and results are summed. If these axes shard the input (by length
  or embedding), it is gathered, and the output is scattered.

`buffer_factor` bounds the rows of a device to int(N·factor), at least 1, instead of P·N: rows that
are last in the order of the device's experts (within an expert: of source devices, then of tokens)
are dropped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.kernels import all_to_all, grouped_matmul
from maxtext.kernels.fp8.grouped_matmul import grouped_matmul_fp8
from maxtext.kernels.weight_only import dequantize
from maxtext.layers.context import REFERENCE, BuildContext
from maxtext.layers.specs import MoeSpec
from maxtext.sharding import AxisRules, manual

HIDDEN_AXIS = "mlp_moe"  # the logical axis of the experts' hidden_dim


class ExpertWeights(NamedTuple):
    """The weight [X, inputs, outputs] and bias [X, outputs] of a grouped matmul, or their logical
    axes.

    An integer weight has a `scale` [X, outputs], which multiplies the outputs before the bias is
    added. An adapter adds x lora_a lora_b, with lora_a [X, inputs, R] and lora_b [X, R, outputs].
    """

    weight: Tree
    bias: Tree = None
    scale: Tree = None
    lora_a: Tree = None
    lora_b: Tree = None


Weights = dict[str, ExpertWeights]
# mlp(rows, apply), where apply(name, rows) multiplies by the named weights
ExpertMlp = Callable[[Array, Callable[[str, Array], Array]], Array]
Order = grouped_matmul.GroupPermutation | all_to_all.AllToAllPlan  # of sorted rows
RunExperts = Callable[[Array, Any], Array]  # of sorted rows and their order


@dataclass(frozen=True)
class SortedExperts:
    spec: MoeSpec
    mlp: ExpertMlp
    dtype: DTypeLike
    sum_dtype: DTypeLike
    context: BuildContext = REFERENCE

    def __call__(
        self,
        x: Array,
        expert_ids: Array,
        router_weights: Array,
        weights: Weights,
        weight_axes: Weights,
    ) -> Array:
        """x [B, S, E], expert_ids [B, S, k] with X for no expert, router_weights [B, S, k] -> [B,
        S, E].
        """
        rules = manual.current()
        if rules is not None:
            return self.on_mesh(rules, x, expert_ids, router_weights, weights, weight_axes)
        platform = self.context.only_platform if self.spec.grouped_kernel else None
        y = self.weighted_sum(
            x,
            expert_ids,
            router_weights,
            num_experts=self.spec.router.experts,
            max_rows=self.max_rows(expert_ids.size),
            run_experts=self.sorted_mlp(weights, platform=platform),
        )
        return y.astype(self.dtype)

    def max_rows(self, assignments: int, peers: int = 1) -> int:
        """The size of a device's buffer of rows."""
        factor = self.spec.buffer_factor
        if factor is None:
            return assignments * peers
        return min(assignments * peers, max(1, int(assignments * factor)))

    def sorted_mlp(
        self, weights: Weights, adds_bias: Array | None = None, platform: str | None = None
    ) -> RunExperts:
        """The MLP of rows that are sorted by expert. `adds_bias`: whether this device adds the bias
        of the output. `platform`: of the only device."""
        fp8 = self.context.precision == "fp8"
        matmul = grouped_matmul_fp8 if fp8 else grouped_matmul.grouped_matmul

        def run(rows: Array, order: Order) -> Array:
            def apply(name: str, rows: Array) -> Array:
                weight, bias, scale, lora_a, lora_b = weights[name]
                y = matmul(rows, weight.astype(rows.dtype), order.group_sizes, platform)
                if scale is not None:
                    y = dequantize(y, take_by_row(scale, order), y.dtype)
                if lora_a is not None:
                    update = rows
                    for factor in (lora_a, lora_b):
                        update = grouped_matmul.grouped_matmul(update, factor, order.group_sizes)
                    y = y + update
                if bias is None:
                    return y
                if name == "wo" and adds_bias is not None:
                    bias = jnp.where(adds_bias, bias, 0)
                return y + take_by_row(bias, order)

            return self.mlp(rows, apply)

        return run

    def weighted_sum(
        self,
        x: Array,
        expert_ids: Array,
        router_weights: Array,
        *,
        num_experts: int,
        max_rows: int,
        run_experts: RunExperts,
    ) -> Array:
        """The sum over the experts of each token, in `sum_dtype`."""
        spec = self.spec
        permute, unpermute = (
            (grouped_matmul.permute_gather_vjp, grouped_matmul.unpermute_gather_vjp)
            if spec.custom_sort_vjp
            else (grouped_matmul.permute, grouped_matmul.unpermute)
        )
        permutation = grouped_matmul.sort_by_group(
            expert_ids.reshape(-1, spec.router.topk), num_experts, max_rows
        )
        rows = permute(x.reshape(-1, x.shape[-1]), permutation)
        if spec.apply_router_weight_on_input:
            row_weights = jnp.take(router_weights.reshape(-1, 1), permutation.assignments, axis=0)
            rows = rows * row_weights.astype(rows.dtype)
            # Also zeroes the gradient of ungrouped rows, which is undefined.
            rows = grouped_matmul.zero_ungrouped_rows(rows, permutation)
        rows = run_experts(rows, permutation)
        outputs = unpermute(rows, permutation).reshape(*expert_ids.shape, -1)
        return sum_choices(outputs, router_weights, spec, self.sum_dtype)

    def on_mesh(
        self,
        rules: AxisRules,
        x: Array,
        expert_ids: Array,
        router_weights: Array,
        weights: Weights,
        weight_axes: Weights,
    ) -> Array:
        arrays, tree = jax.tree.flatten(weights)
        logical_axes = [
            axes for name in sorted(weight_axes) for axes in weight_axes[name] if axes is not None
        ]
        sharding = ExpertSharding.from_rules(
            rules, x.shape, logical_axes, [array.shape for array in arrays]
        )
        token_split = (*sharding.activation_split[:2], ())
        weight_splits = [
            sharding.weight_split(rules, axes, array.shape)
            for axes, array in zip(logical_axes, arrays, strict=True)
        ]

        def run(x: Array, expert_ids: Array, router_weights: Array, *shards: Array) -> Array:
            x = sharding.gather_tokens(x, sharding.activation_split)
            expert_ids = sharding.gather_tokens(expert_ids, token_split)
            router_weights = sharding.gather_tokens(router_weights, token_split)
            gathered = [
                sharding.gather_weight(shard, axes, split, self.spec.two_stage_gather)
                for shard, axes, split in zip(shards, logical_axes, weight_splits, strict=True)
            ]
            hidden_axes = sharding.hidden_axes
            adds_bias = jax.lax.axis_index(hidden_axes) == 0 if hidden_axes else None
            run_experts = self.sorted_mlp(jax.tree.unflatten(tree, gathered), adds_bias)
            y = self.on_device(rules, sharding, x, expert_ids, router_weights, run_experts)
            return sharding.reduce_scatter(y.astype(self.dtype))

        splits = (sharding.activation_split, token_split, token_split, *weight_splits)
        arguments = (x, expert_ids, router_weights, *arrays)
        return manual.run_manual(rules, run, arguments, splits, sharding.activation_split)

    def on_device(
        self,
        rules: AxisRules,
        sharding: "ExpertSharding",
        x: Array,
        expert_ids: Array,
        router_weights: Array,
        run_experts: RunExperts,
    ) -> Array:
        """The sum of this device's tokens over all experts; a partial sum over hidden_dim, if that
        is sharded.
        """
        num_experts, spec = self.spec.router.experts, self.spec
        expert_axes = sharding.expert_axes
        peers = math.prod(rules.mesh.shape[axis] for axis in expert_axes)
        if peers == 1:
            return self.weighted_sum(
                x,
                expert_ids,
                router_weights,
                num_experts=num_experts,
                max_rows=self.max_rows(expert_ids.size),
                run_experts=run_experts,
            )
        max_rows = self.max_rows(expert_ids.size, peers)
        token_axes = tuple(axis for axis in expert_axes if axis in sharding.token_axes)
        if not spec.ring and token_axes == expert_axes:
            exchange = all_to_all.AllToAllSpec(
                axes=expert_axes,
                local_rows=expert_ids.size,
                buffer_rows=max_rows,
                ragged=manual.platform(rules) in all_to_all.RAGGED_PLATFORMS,
                varying_axes=sharding.axes,
            )
            return self.weighted_sum(
                x,
                expert_ids,
                router_weights,
                num_experts=num_experts,
                max_rows=expert_ids.size,
                run_experts=self.run_on_owners(run_experts, exchange),
            )
        own_experts, rank = num_experts // peers, jax.lax.axis_index(expert_axes)
        own_ids = gather(expert_ids, token_axes, 0) - rank * own_experts
        own_ids = jnp.where((own_ids >= 0) & (own_ids < own_experts), own_ids, own_experts)
        y = self.weighted_sum(
            gather(x, token_axes, 0),
            own_ids,
            gather(router_weights, token_axes, 0),
            num_experts=own_experts,
            max_rows=max_rows,
            run_experts=run_experts,
        )
        replicated_axes = tuple(axis for axis in expert_axes if axis not in token_axes)
        y = jax.lax.psum(y, replicated_axes) if replicated_axes else y
        if not token_axes:
            return y
        return jax.lax.psum_scatter(y, token_axes, scatter_dimension=0, tiled=True)

    def run_on_owners(
        self, run_experts: RunExperts, exchange: all_to_all.AllToAllSpec
    ) -> RunExperts:
        """`run_experts` on the devices that own the experts of the rows."""
        dispatch, combine = (
            (all_to_all.dispatch_gather_vjp, all_to_all.combine_gather_vjp)
            if self.spec.custom_sort_vjp
            else (all_to_all.dispatch, all_to_all.combine)
        )

        def run(rows: Array, permutation: grouped_matmul.GroupPermutation) -> Array:
            plan = all_to_all.plan_all_to_all(permutation.group_sizes, exchange)
            received = dispatch(rows, plan, exchange)
            return combine(run_experts(received, plan), plan, exchange)

        return run


@dataclass(frozen=True)
class ExpertSharding:
    """The roles of mesh axes; `activation_split` is the sharding of x [B, S, E] and of the
    output.
    """

    activation_split: manual.Split
    token_axes: tuple[str, ...]
    expert_axes: tuple[str, ...]
    hidden_axes: tuple[str, ...]

    @classmethod
    def from_rules(
        cls,
        rules: AxisRules,
        x_shape: Sequence[int],
        weight_axes: Sequence[Sequence[str]],
        weight_shapes: Sequence[Sequence[int]],
    ) -> "ExpertSharding":
        """`weight_axes`: the logical axes of the weights, whose first dimension is the experts."""
        batch, length, _ = rules.axes_of(
            ("activation_batch_moe", "activation_length_moe", None), x_shape
        )
        splits = [
            rules.axes_of(axes, shape)
            for axes, shape in zip(weight_axes, weight_shapes, strict=True)
        ]
        (activation_axes,) = rules.axes_of(("activation_exp",), weight_shapes[0][:1])
        expert_axes = tuple(
            axis for axis in common_axes([split[0] for split in splits]) if axis in activation_axes
        )
        hidden_splits = [
            mesh_axes
            for axes, split in zip(weight_axes, splits, strict=True)
            for name, mesh_axes in zip(axes, split, strict=True)
            if name == HIDDEN_AXIS
        ]
        hidden_axes = tuple(
            axis for axis in common_axes(hidden_splits) if axis not in (*batch, *length)
        )
        x_split = rules.axes_of(
            ("activation_batch_moe", "activation_norm_length_moe", "activation_embed_moe"), x_shape
        )
        embed_split = tuple(axis for axis in x_split[2] if axis in hidden_axes)
        token_axes = tuple(
            axis for axis in manual.used_axes(x_split[:2]) if axis not in hidden_axes
        )
        return cls((*x_split[:2], embed_split), token_axes, expert_axes, hidden_axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which devices compute different results."""
        return tuple(dict.fromkeys((*self.token_axes, *self.expert_axes, *self.hidden_axes)))

    def weight_split(
        self, rules: AxisRules, axes: Sequence[str], shape: Sequence[int]
    ) -> manual.Split:
        """The sharding of a weight. The axes that a dimension keeps are outermost, so that a gather
        leaves it contiguous.

        Axes without a role are left out: weights are gathered over them before.
        """
        return tuple(
            (
                *matmul_axes,
                *(axis for axis in split if axis in self.token_axes and axis not in matmul_axes),
            )
            for matmul_axes, split in zip(
                self.matmul_split(axes), rules.axes_of(axes, shape), strict=True
            )
        )

    def matmul_split(self, axes: Sequence[str]) -> list[tuple[str, ...]]:
        """The sharding of each dimension of a weight during the matmul."""
        hidden = (self.hidden_axes if name == HIDDEN_AXIS else () for name in axes[1:])
        return [self.expert_axes, *hidden]

    def gather_weight(
        self, shard: Array, axes: Sequence[str], split: manual.Split, two_stages: bool
    ) -> Array:
        shard = manual.cast_varying(shard, self.axes, varying=manual.used_axes(split))
        for dim, (matmul_axes, mesh_axes) in enumerate(
            zip(self.matmul_split(axes), split, strict=True)
        ):
            gathered = mesh_axes[len(matmul_axes) :]
            stages = [(axis,) for axis in reversed(gathered)] if two_stages else [gathered]
            for stage in stages:
                shard = gather(shard, stage, dim)
        return shard

    def gather_tokens(self, array: Array, split: manual.Split) -> Array:
        """All-gather over the devices that compute other parts of hidden_dim for the same
        tokens.
        """
        array = manual.cast_varying(array, self.axes, varying=manual.used_axes(split))
        for dim, axes in enumerate(split):
            array = gather(array, tuple(axis for axis in axes if axis in self.hidden_axes), dim)
        return array

    def reduce_scatter(self, y: Array) -> Array:
        """The sum over parts of hidden_dim, sharded like x."""
        for dim, axes in enumerate(self.activation_split):
            scattered = tuple(axis for axis in axes if axis in self.hidden_axes)
            if scattered:
                y = jax.lax.psum_scatter(y, scattered, scatter_dimension=dim, tiled=True)
        used = manual.used_axes(self.activation_split)
        remaining = tuple(axis for axis in self.hidden_axes if axis not in used)
        return jax.lax.psum(y, remaining) if remaining else y


def sum_choices(outputs: Array, router_weights: Array, spec: MoeSpec, dtype: DTypeLike) -> Array:
    """[B, S, E] in `dtype`: the weighted sum of the experts' outputs [B, S, k, E]."""
    outputs = outputs.astype(dtype)
    if not spec.apply_router_weight_on_input:
        outputs = outputs * router_weights[..., None].astype(dtype)
    return jnp.sum(outputs, axis=-2)


def take_by_row(values: Array, order: Order) -> Array:
    """values [X, outputs] -> [N, outputs]: those of each row's expert, zeros after the last."""
    return jnp.take(values, order.group_ids, axis=0, mode="fill", fill_value=0)


def gather(array: Array, axes: tuple[str, ...], dim: int) -> Array:
    return jax.lax.all_gather(array, axes, axis=dim, tiled=True) if axes else array


def common_axes(splits: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The axes that all splits have, in the order of the first."""
    return tuple(axis for axis in splits[0] if all(axis in split for split in splits))
