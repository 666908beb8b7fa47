"""The sparse method of a mixture of experts: assignments are sorted by expert and multiplied group
by group.

Shapes: B batch, S sequence, T = B·S tokens, k choices of a token, N = T·k assignments, X experts, E
embedding, M expert width, P devices that share the experts; all of one device's tokens when there
are several.

On one device that is all. On a mesh, each device sorts its own tokens, and the mesh axes have these
parts:
- tokens: axes that split batch or length. Kernels that they split, too (fsdp), are gathered for the
  product.
- owners: axes that split the experts, as `exp` and `activation_exp` have them. Rows travel to the
  owner of their expert and back (`kernels/all_to_all.py`). With `ring`, or where an owner axis does
  not split tokens, the owners gather all their tokens instead, each multiplies by its experts, and
  the sums are scattered.
- width: axes that split the width of experts and not the tokens (tensor parallelism). Each device
  computes its part of the width, and results are summed. Where these axes split what comes in (by
  length or embedding), it is gathered, and what goes out is scattered.

`buffer_factor` bounds the rows of one device to int(N·factor), at least 1, where all that can
arrive are P·N: what is last in the order of the device's experts (within an expert: of the tokens'
devices, then of tokens) is dropped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from maxtext.kernels import all_to_all, grouped_matmul
from maxtext.kernels.fp8.grouped_matmul import grouped_matmul_fp8
from maxtext.kernels.weight_only import dequantize
from maxtext.layers.context import REFERENCE, BuildContext
from maxtext.sharding import AxisRules, manual

if TYPE_CHECKING:
    from maxtext.layers.moe import MoeSpec


WIDTH = "mlp_moe"  # the name of the experts' width


class Affine(NamedTuple):
    """The kernels [X, inputs, outputs] and biases [X, outputs] of one product, or the names of
    their axes.

    Kernels of integers have a `scale` [X, outputs], by which their product is multiplied before the
    bias is added.
    """

    kernel: Any
    bias: Any = None
    scale: Any = None


Weights = dict[str, Affine]
Feed = Callable[
    [Array, Callable[[str, Array], Array]], Array
]  # of rows, and of how to multiply by the named weights


@dataclass(frozen=True)
class SortedExperts:
    spec: "MoeSpec"
    feed: Feed
    dtype: Any
    sum_dtype: Any
    context: BuildContext = REFERENCE

    def __call__(
        self, x: Array, targets: Array, shares: Array, weights: Weights, names: Weights
    ) -> Array:
        """x [B, S, E], targets [B, S, k] with X for no expert, shares [B, S, k] of the choices ->
        [B, S, E].

        `names`: the logical axes of the weights.
        """
        rules = manual.current()
        if rules is not None:
            return self.on_mesh(rules, x, targets, shares, weights, names)
        count, bound = self.spec.router.experts, self.bound(targets.size)
        experts = self.local(
            weights, platform=self.context.only_platform if self.spec.grouped_kernel else None
        )
        return self.chosen_sum(x, targets, shares, count, bound, experts).astype(self.dtype)

    def bound(self, assignments: int, peers: int = 1) -> int:
        factor = self.spec.buffer_factor
        return (
            assignments * peers
            if factor is None
            else min(assignments * peers, max(1, int(assignments * factor)))
        )

    def local(
        self, weights: Weights, first: Array | None = None, platform: str | None = None
    ) -> Callable[[Array, Any], Array]:
        """The experts of rows that are sorted by them. `first`: whether this device adds the last
        bias. `platform`: of the only device."""

        multiply = (
            grouped_matmul_fp8 if self.context.precision == "fp8" else grouped_matmul.grouped_matmul
        )

        def run(
            rows: Array, order: grouped_matmul.GroupPermutation | all_to_all.AllToAllPlan
        ) -> Array:
            def apply(name: str, rows: Array) -> Array:
                kernel, bias, scale = weights[name]
                y = multiply(rows, kernel.astype(rows.dtype), order.group_sizes, platform)
                if scale is not None:
                    y = dequantize(y, of_rows(scale, order), y.dtype)
                if bias is None:
                    return y
                if name == "wo" and first is not None:
                    bias = jnp.where(first, bias, 0)
                return y + of_rows(bias, order)

            return self.feed(rows, apply)

        return run

    def chosen_sum(
        self,
        x: Array,
        targets: Array,
        shares: Array,
        count: int,
        bound: int,
        run: Callable[[Array, Any], Array],
    ) -> Array:
        """For each token the sum over its choices, in `sum_dtype`; `run` makes results of sorted
        rows.
        """
        spec = self.spec
        sort, give_back = (
            (grouped_matmul.permute_gather_vjp, grouped_matmul.unpermute_gather_vjp)
            if spec.custom_sort_vjp
            else (grouped_matmul.permute, grouped_matmul.unpermute)
        )
        order = grouped_matmul.sort_by_group(targets.reshape(-1, spec.router.chosen), count, bound)
        rows = sort(x.reshape(-1, x.shape[-1]), order)
        if spec.weigh_input:
            rows = rows * jnp.take(shares.reshape(-1, 1), order.assignments, axis=0).astype(
                rows.dtype
            )
            rows = grouped_matmul.zero_ungrouped_rows(
                rows, order
            )  # for the gradient of the others, which can be anything
        rows = run(rows, order)
        parts = give_back(rows, order).reshape(*targets.shape, -1).astype(self.sum_dtype)
        if not spec.weigh_input:
            parts = parts * shares[..., None].astype(self.sum_dtype)
        return jnp.sum(parts, axis=-2)

    def on_mesh(
        self,
        rules: AxisRules,
        x: Array,
        targets: Array,
        shares: Array,
        weights: Weights,
        names: Weights,
    ) -> Array:
        arrays, tree = jax.tree.flatten(weights)
        named = [axes for name in sorted(names) for axes in names[name] if axes is not None]
        layout = Layout.of(rules, x.shape, named, [array.shape for array in arrays])
        by_token = (*layout.entry[:2], ())
        splits = [
            layout.weight(rules, axes, array.shape)
            for axes, array in zip(named, arrays, strict=True)
        ]

        def run(x: Array, targets: Array, shares: Array, *shards: Array) -> Array:
            x = layout.whole_tokens(x, layout.entry)
            targets, shares = (
                layout.whole_tokens(targets, by_token),
                layout.whole_tokens(shares, by_token),
            )
            whole = [
                layout.whole_weight(shard, axes, split, self.spec.two_stage_gather)
                for shard, axes, split in zip(shards, named, splits, strict=True)
            ]
            first = jax.lax.axis_index(layout.width) == 0 if layout.width else None
            experts = self.local(jax.tree.unflatten(tree, whole), first)
            y = self.of_tokens(rules, layout, x, targets, shares, experts)
            return layout.add_and_scatter(y.astype(self.dtype))

        arguments = (x, targets, shares, *arrays)
        return manual.run_manual(
            rules, run, arguments, (layout.entry, by_token, by_token, *splits), layout.entry
        )

    def of_tokens(
        self,
        rules: AxisRules,
        layout: "Layout",
        x: Array,
        targets: Array,
        shares: Array,
        experts: Callable,
    ) -> Array:
        """Of this device's tokens, by all experts that it can reach: a part of the width, if that
        is split.
        """
        count, spec = self.spec.router.experts, self.spec
        peers = math.prod(rules.mesh.shape[axis] for axis in layout.owners)
        if peers == 1:
            return self.chosen_sum(x, targets, shares, count, self.bound(targets.size), experts)
        bound = self.bound(targets.size, peers)
        among = tuple(axis for axis in layout.owners if axis in layout.tokens)
        if not spec.ring and among == layout.owners:
            ragged = manual.platform(rules) in all_to_all.RAGGED_PLATFORMS
            way = all_to_all.AllToAllSpec(layout.owners, targets.size, bound, ragged, layout.all)
            send, fetch = (
                (all_to_all.dispatch_gather_vjp, all_to_all.combine_gather_vjp)
                if spec.custom_sort_vjp
                else (all_to_all.dispatch, all_to_all.combine)
            )

            def travel(rows: Array, order: grouped_matmul.GroupPermutation) -> Array:
                plan = all_to_all.plan_all_to_all(order.group_sizes, way)
                return fetch(experts(send(rows, plan, way), plan), plan, way)

            return self.chosen_sum(x, targets, shares, count, targets.size, travel)
        own, rank = count // peers, jax.lax.axis_index(layout.owners)
        local = gather(targets, among, 0) - rank * own
        local = jnp.where((local >= 0) & (local < own), local, own)
        y = self.chosen_sum(
            gather(x, among, 0), local, gather(shares, among, 0), own, bound, experts
        )
        others = tuple(axis for axis in layout.owners if axis not in among)
        y = jax.lax.psum(y, others) if others else y
        return jax.lax.psum_scatter(y, among, scatter_dimension=0, tiled=True) if among else y


@dataclass(frozen=True)
class Layout:
    """Which part each mesh axis has; `entry` is the split of x [B, S, E] as it comes in and goes
    out.
    """

    entry: tuple[tuple[str, ...], ...]
    tokens: tuple[str, ...]
    owners: tuple[str, ...]
    width: tuple[str, ...]

    @classmethod
    def of(
        cls,
        rules: AxisRules,
        shape: Sequence[int],
        names: Sequence[Sequence[str]],
        shapes: Sequence[Sequence[int]],
    ) -> "Layout":
        """For x of a shape, and weights of these names of axes and shapes; experts are their first
        dimension.
        """
        batch, length, _ = rules.axes_of(
            ("activation_batch_moe", "activation_length_moe", None), shape
        )
        splits = [rules.axes_of(axes, sizes) for axes, sizes in zip(names, shapes, strict=True)]
        (acting,) = rules.axes_of(("activation_exp",), shapes[0][:1])
        owners = tuple(axis for axis in common([split[0] for split in splits]) if axis in acting)
        widths = [
            chosen
            for axes, split in zip(names, splits, strict=True)
            for name, chosen in zip(axes, split, strict=True)
            if name == WIDTH
        ]
        width = tuple(axis for axis in common(widths) if axis not in (*batch, *length))
        entry = rules.axes_of(
            ("activation_batch_moe", "activation_norm_length_moe", "activation_embed_moe"), shape
        )
        embedding = tuple(axis for axis in entry[2] if axis in width)
        tokens = tuple(axis for axis in manual.used(entry[:2]) if axis not in width)
        return cls((*entry[:2], embedding), tokens, owners, width)

    @property
    def all(self) -> tuple[str, ...]:
        """The axes over which devices compute different things."""
        return tuple(dict.fromkeys((*self.tokens, *self.owners, *self.width)))

    def weight(
        self, rules: AxisRules, names: Sequence[str], shape: Sequence[int]
    ) -> tuple[tuple[str, ...], ...]:
        """How a weight comes in. What a dimension keeps is outermost, so that a gather leaves it in
        one piece.

        Axes that have no part here are left out: what they split is gathered before.
        """
        return tuple(
            (*kept, *(axis for axis in chosen if axis in self.tokens and axis not in kept))
            for kept, chosen in zip(self.kept(names), rules.axes_of(names, shape), strict=True)
        )

    def kept(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """The axes that split each dimension of a weight during the product, too."""
        return [self.owners, *(self.width if name == WIDTH else () for name in names[1:])]

    def whole_weight(
        self, shard: Array, names: Sequence[str], split: manual.Split, two_stages: bool
    ) -> Array:
        shard = manual.differing(shard, self.all, known=manual.used(split))
        for place, (kept, chosen) in enumerate(zip(self.kept(names), split, strict=True)):
            gathered = chosen[len(kept) :]
            stages = [(axis,) for axis in reversed(gathered)] if two_stages else [gathered]
            for axes in stages:
                shard = gather(shard, axes, place)
        return shard

    def whole_tokens(self, array: Array, split: manual.Split) -> Array:
        """With what other devices hold that compute other parts of the width for the same
        tokens.
        """
        array = manual.differing(array, self.all, known=manual.used(split))
        for place, axes in enumerate(split):
            array = gather(array, tuple(axis for axis in axes if axis in self.width), place)
        return array

    def add_and_scatter(self, y: Array) -> Array:
        """The sum over parts of the width, laid out as x came in."""
        for place, axes in enumerate(self.entry):
            scattered = tuple(axis for axis in axes if axis in self.width)
            if scattered:
                y = jax.lax.psum_scatter(y, scattered, scatter_dimension=place, tiled=True)
        rest = tuple(axis for axis in self.width if axis not in manual.used(self.entry))
        return jax.lax.psum(y, rest) if rest else y


def of_rows(each: Array, order: grouped_matmul.GroupPermutation | all_to_all.AllToAllPlan) -> Array:
    """each [X, outputs] -> [N, outputs]: that of each row's expert, zeros behind the last."""
    return jnp.take(each, order.group_ids, axis=0, mode="fill", fill_value=0)


def gather(array: Array, axes: tuple[str, ...], place: int) -> Array:
    return jax.lax.all_gather(array, axes, axis=place, tiled=True) if axes else array


def common(splits: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The axes that all of them have, in the order of the first."""
    return tuple(axis for axis in splits[0] if all(axis in split for split in splits))
