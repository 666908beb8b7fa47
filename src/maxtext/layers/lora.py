"""Low-rank adapters (LoRA, DoRA) as parameters of a module, and the trees that they form.

    y = W x + scale · B(A dropout(x))
    y = m ⊙ (W x + scale · B(A dropout(x))) / ‖W + scale · B A‖      DoRA; norms over the inputs

W [*in_shape, *out_shape], lora_a [*in_shape, R], lora_b [R, *out_shape], lora_magnitude m
[*out_shape]. A is initialized uniformly in ±1/√inputs (kaiming) or with a deviation of 1/R
(gaussian), B with zeros and m with ‖W‖: a new adapter changes no output. Adapters are stored in
their own dtype, float32 unless the spec says otherwise, and computed in that of their layer; DoRA's
norm is computed in the former, and has no gradient.

A model for serving holds the adapters of n slots: lora_a [*in_shape, n R], lora_b [n R,
*out_shape], which includes the scale, and for DoRA lora_factor m/‖·‖ [n + 1, *out_shape], whose
first row is 1. Each row of a batch, or each token of a shared row, has the index of its adapter.
All adapters are multiplied, and those that are not selected contribute zeros.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.layers.adapters import GAUSSIAN, AdapterInputs, AdapterSpec, LayerAdapter
from maxtext.layers.parameters import Initializer, Template, dropout
from maxtext.layers.weight_layout import WeightLayout

PREFIX = "lora_"  # of the parameters of adapters
A, MAGNITUDE = "lora_a", "lora_magnitude"


class LowRank:
    """The parameters and the forward pass of a module's adapter; for classes of `nnx.Module`."""

    def init_adapter(
        self,
        initializer: Initializer,
        adapter: LayerAdapter,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        axes: Sequence[str | None],
        dtype: DTypeLike,
        weight: jax.Array | None = None,
    ) -> None:
        """`axes` are those of the weight; `dtype` that of the computation; `weight` gives DoRA's
        magnitudes."""
        self.adapter = adapter
        self.adapter_dtype = dtype
        self.in_dims = len(in_shape)
        self.dropout_name = zlib.crc32("/".join(initializer.paths).encode())
        in_axes, out_axes = tuple(axes[: self.in_dims]), tuple(axes[self.in_dims :])
        spec, columns = adapter.spec, adapter.rank * (adapter.slots or 1)
        cast_to = None if spec.dora else dtype  # DoRA's norm is computed from the factors as stored
        a_shape = (*in_shape, columns)
        if spec.slots:
            a = jnp.zeros(a_shape, spec.dtype)
        else:
            a = initial_a(initializer, a_shape, spec)
        self.lora_a = adapter_param(a, (*in_axes, None), cast_to)
        self.lora_a.set_metadata(copy_of=spec.source(initializer.paths))
        b = jnp.zeros((columns, *out_shape), spec.dtype)
        self.lora_b = adapter_param(b, (None, *out_axes), cast_to)
        magnitude = factor = None
        if spec.dora and spec.slots:
            ones = jnp.ones((spec.slots + 1, *out_shape), jnp.float32)
            factor = adapter_param(ones, (None, *out_axes))
        elif spec.dora:
            assert weight is not None
            norms = weight_norm(weight.astype(spec.dtype), self.in_dims)
            magnitude = adapter_param(norms, out_axes)
        self.lora_magnitude = magnitude
        self.lora_factor = factor

    def add_update(
        self, hidden: jax.Array, y: jax.Array, weight: Tree, inputs: AdapterInputs
    ) -> jax.Array:
        """y = x · weight with the adapter, where `hidden` is x A; without a bias, which is added
        afterwards."""
        if self.adapter.slots:
            return self.add_selected(hidden, y, inputs)
        a, b, scale = self.lora_a[...], self.lora_b[...], self.adapter_scale(inputs)
        y = y + jnp.tensordot((hidden * scale).astype(y.dtype), b.astype(y.dtype), 1)
        if self.lora_magnitude is None:
            return y
        merged = weight.astype(a.dtype) + jnp.tensordot(a * scale, b, 1)
        return (y.astype(a.dtype) * self.dora_factor(merged, scale)).astype(y.dtype)

    def drop(self, x: jax.Array, inputs: AdapterInputs) -> jax.Array:
        """x after the adapter's dropout."""
        if inputs.key is None:
            return x
        key = jax.random.fold_in(inputs.key, self.dropout_name)
        return dropout(x, self.adapter.spec.dropout, key)

    def dora_factor(self, merged: jax.Array, scale: jax.Array | float) -> jax.Array:
        """m / ‖W + scale · B A‖, [*out_shape]; 1 for a stacked layer without an adapter."""
        assert self.lora_magnitude is not None
        norms = jax.lax.stop_gradient(weight_norm(merged, self.in_dims))
        return jnp.where(scale == 0, 1, self.lora_magnitude[...] / norms)

    def add_selected(self, hidden: jax.Array, y: jax.Array, inputs: AdapterInputs) -> jax.Array:
        """The same with the adapter of each row or token."""
        if inputs.ids is None:
            return y
        hidden = select_slots(hidden, inputs.ids, self.adapter.slots, [self.adapter.rank])
        y = y + jnp.tensordot(hidden, self.lora_b[...].astype(y.dtype), 1)
        if self.lora_factor is None:
            return y
        factor = jnp.take(self.lora_factor[...], align(inputs.ids, hidden.ndim - 1), axis=0)
        return (y.astype(factor.dtype) * factor).astype(y.dtype)

    def adapter_scale(self, inputs: AdapterInputs) -> jax.Array | float:
        return layer_scale(self.adapter, inputs)

    def merge(self, weight: Tree, inputs: AdapterInputs) -> jax.Array:
        """The weight with the adapter in it, in the adapter's dtype, for layers that multiply by
        parts of their weight. Not for serving."""
        assert not self.adapter.slots
        a, scale = self.lora_a[...], self.adapter_scale(inputs)
        merged = weight.astype(a.dtype) + jnp.tensordot(a * scale, self.lora_b[...], 1)
        return merged if self.lora_magnitude is None else merged * self.dora_factor(merged, scale)


@dataclass(frozen=True)
class PackedAdapter:
    """The adapters of projections that are computed by one matmul [K, N], for inference; of n
    slots, or the adapter of all rows (n = 1).

    lora_a [K, Σ n R] has the columns of one projection after the other; lora_b [Σ n R, N] is block
    diagonal, so that an update has zeros in the outputs of other projections."""

    names: tuple[str, ...]  # of the projections, in the module that has them
    ranks: tuple[int, ...]  # 0: a projection without adapters
    scales: tuple[float, ...]
    in_shape: tuple[int, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    spec: AdapterSpec

    @classmethod
    def of(cls, initializer: Initializer, layout: WeightLayout) -> "PackedAdapter | None":
        """None if no projection has an adapter."""
        spec = initializer.context.adapters
        if spec is None:
            return None
        layers = [spec.at(initializer.child(name).paths) for name in layout.names]
        if not any(layers):
            return None
        return cls(
            names=layout.names,
            ranks=tuple(0 if layer is None else layer.rank for layer in layers),
            scales=tuple(0.0 if layer is None else layer.scales[0] for layer in layers),
            in_shape=layout.in_shape,
            out_shapes=layout.out_shapes,
            spec=spec,
        )

    @property
    def slots(self) -> int:
        return self.spec.slots

    def params(self, dtype: DTypeLike) -> tuple[nnx.Param, nnx.Param]:
        """lora_a and lora_b, which a layer casts to `dtype`."""
        columns = (self.slots or 1) * sum(self.ranks)
        outputs = sum(map(math.prod, self.out_shapes))
        shapes = (math.prod(self.in_shape), columns), (columns, outputs)
        a, b = (
            nnx.Param(
                jnp.zeros(shape, self.spec.dtype),
                axes=(None, None),
                fixed_dtype=True,
                packed=self,
                cast_to=dtype,
            )
            for shape in shapes
        )
        return a, b

    def select(self, hidden: jax.Array, ids: jax.Array | None) -> jax.Array | None:
        """x A [..., Σ n R] with zeros for other adapters than that of each row or token; None if
        there is none."""
        if not self.slots:
            return hidden
        return None if ids is None else select_slots(hidden, ids, self.slots, self.ranks)

    def pack(self, kind: str, factors: Sequence[jax.Array | None]) -> jax.Array:
        """lora_a or lora_b of those of each projection, without slots; None: it has no adapter."""
        if kind == A:
            rows = math.prod(self.in_shape)
            return jnp.concatenate([a.reshape(rows, -1) for a in factors if a is not None], axis=1)
        blocks = [
            jnp.zeros((0, math.prod(shape)), self.spec.dtype)
            if b is None
            else scale * b.reshape(b.shape[0], -1)
            for b, shape, scale in zip(factors, self.out_shapes, self.scales, strict=True)
        ]
        return jax.scipy.linalg.block_diag(*blocks)


def down_project(x: jax.Array, layers: Sequence[LowRank], inputs: AdapterInputs) -> list[jax.Array]:
    """x A of each layer, [..., R]. One matmul reads x once for all, unless dropout gives each layer
    its own."""
    if not layers:
        return []
    dtype, in_dims = layers[0].adapter_dtype, layers[0].in_dims
    if has_dropout(layers, inputs):
        return [
            jnp.tensordot(
                layer.drop(x, inputs).astype(dtype), layer.lora_a[...].astype(dtype), in_dims
            )
            for layer in layers
        ]
    return split_columns(jnp.tensordot(x.astype(dtype), packed_a(layers), in_dims), layers)


def has_dropout(layers: Sequence[LowRank], inputs: AdapterInputs) -> bool:
    """Whether each layer has another input after its dropout."""
    return inputs.key is not None and bool(layers[0].adapter.spec.dropout)


def packed_a(layers: Sequence[LowRank]) -> jax.Array:
    """A of layers with one input, in one matrix."""
    dtype = layers[0].adapter_dtype
    return jnp.concatenate([layer.lora_a[...].astype(dtype) for layer in layers], axis=-1)


def split_columns(hidden: jax.Array, layers: Sequence[LowRank]) -> list[jax.Array]:
    """x A of each layer, from x times `packed_a`."""
    ends = list(accumulate(layer.lora_a.shape[-1] for layer in layers))
    return jnp.split(hidden, ends[:-1], axis=-1)


def select_slots(hidden: jax.Array, ids: jax.Array, slots: int, ranks: Sequence[int]) -> jax.Array:
    """hidden [..., Σ n R] with zeros in the columns of other adapters than that of each row or
    token. `ranks` are those of the layers whose columns follow each other."""
    slot_of_column = np.concatenate([np.repeat(np.arange(1, slots + 1), rank) for rank in ranks])
    selected = align(ids, hidden.ndim - 1)[..., None] == slot_of_column
    return jnp.where(selected, hidden, 0)


def layer_scale(adapter: LayerAdapter, inputs: AdapterInputs) -> jax.Array | float:
    """`AdapterSpec.scale` of a layer, 0 without an adapter; an array if stacked layers differ."""
    if len(set(adapter.scales)) == 1:
        return adapter.scales[0]
    assert inputs.repeat is not None, "stacked layers with different adapters need their index"
    return jnp.asarray(adapter.scales, adapter.spec.dtype)[inputs.repeat]


def expert_adapter(
    initializer: Initializer,
    adapter: LayerAdapter,
    shape: tuple[int, int, int],
    axes: Sequence[str | None],
) -> tuple[nnx.Param, nnx.Param]:
    """lora_a [X, inputs, R] and lora_b [X, R, outputs] of the experts' weight [X, inputs, outputs];
    for serving with a leading dimension of slots."""
    (experts, inputs, outputs), (expert_axis, input_axis, output_axis) = shape, axes
    spec, rank = adapter.spec, adapter.rank
    slots, slot_axes = ((spec.slots,), (None,)) if spec.slots else ((), ())
    if spec.slots:
        a = jnp.zeros((spec.slots, experts, inputs, rank), spec.dtype)
    else:
        a = initial_a(initializer, (experts, inputs, rank), spec, inputs)
    b = jnp.zeros((*slots, experts, rank, outputs), spec.dtype)
    return (
        adapter_param(a, (*slot_axes, expert_axis, input_axis, None)),
        adapter_param(b, (*slot_axes, expert_axis, None, output_axis)),
    )


class SavedCopies(nnx.Module):
    """For serving: weights that replace the base's for the adapters that have them, PEFT's
    modules_to_save. lora_weight [k, *shape]; lora_copy [n + 1] is the copy of each adapter, counted
    from 1; 0: none."""

    def __init__(self, count: int, slots: int, shape: Sequence[int], dtype: DTypeLike):
        axes = (None,) * (len(shape) + 1)
        self.lora_weight = adapter_param(jnp.zeros((count, *shape), dtype), axes)
        self.lora_copy = adapter_param(jnp.zeros(slots + 1, jnp.int32), (None,))

    @classmethod
    def of(
        cls, spec: AdapterSpec | None, module: str, shape: Sequence[int], dtype: DTypeLike
    ) -> "SavedCopies | None":
        if spec is None or not spec.slots or not spec.saves(module):
            return None
        return cls(spec.saved.count(module), spec.slots, shape, dtype)

    def select(
        self, y: jax.Array, ids: jax.Array | None, compute: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """y [B, S, ...], with compute(weight) in the rows whose adapter has a copy."""
        if ids is None:
            return y
        weights, copy = self.lora_weight[...], jnp.take(self.lora_copy[...], ids)
        for number in range(weights.shape[0]):
            y = jnp.where(align(copy == number + 1, y.ndim), compute(weights[number]), y)
        return y


def adapter_param(
    value: jax.Array, axes: Sequence[str | None], cast_to: DTypeLike | None = None
) -> nnx.Param:
    """`cast_to`: the dtype to which the layer casts the values before it uses them."""
    return nnx.Param(value, axes=tuple(axes), trained=True, fixed_dtype=True, cast_to=cast_to)


def initial_a(
    initializer: Initializer, shape: Sequence[int], spec: AdapterSpec, inputs: int | None = None
) -> jax.Array:
    """[*in_shape, R], or more dimensions before the inputs."""
    normal = initializer.standard_normal(A, tuple(shape))
    if spec.init == GAUSSIAN:
        return (normal / shape[-1]).astype(spec.dtype)
    uniform = 2 * jax.scipy.special.ndtr(normal) - 1
    return (uniform / math.sqrt(inputs or math.prod(shape[:-1]))).astype(spec.dtype)


def weight_norm(weight: jax.Array, in_dims: int) -> jax.Array:
    """The Euclidean norm over the inputs, [*out_shape]."""
    return jnp.sqrt(jnp.sum(jnp.square(weight), axis=tuple(range(in_dims))))


def align(ids: jax.Array, batch_dims: int) -> jax.Array:
    """ids [B] or [B, S] with dimensions of size 1 up to `batch_dims`."""
    return ids.reshape(*ids.shape, *[1] * (batch_dims - ids.ndim))


def freeze_base(model: nnx.Module, spec: AdapterSpec) -> None:
    """Mark all parameters but those of adapters, and of modules that are saved in full, as not
    trained."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            trained = is_adapter(path) or spec.saves("/".join(map(str, path)))
            node.set_metadata(trained=trained)


def is_adapter(path: Sequence[object]) -> bool:
    """Whether the parameter at a path belongs to an adapter."""
    return str(path[-1]).startswith(PREFIX)


def split_adapter(tree: Tree) -> tuple[Tree, Tree]:
    """(base, adapter): a tree of weights without and with only the parameters of adapters."""
    base: dict = {}
    adapter: dict = {}
    for name, branch in tree.items():
        if not isinstance(branch, dict):
            (adapter if is_adapter((name,)) else base)[name] = branch
            continue
        base_branch, adapter_branch = split_adapter(branch)
        if base_branch:
            base[name] = base_branch
        if adapter_branch:
            adapter[name] = adapter_branch
    return base, adapter


def copy_sources(template: Template) -> Tree:
    """Of each weight, the name of the sibling module whose weight it is a copy of, or None; see
    `AdapterSpec.shared`."""
    return template.metadata(lambda metadata: metadata.get("copy_of"))


def sum_copies(gradients: Tree, sources: Tree) -> Tree:
    """Gradients with the sum of all copies at their source, and zeros at the copies."""
    summed = {
        name: sum_copies(branch, sources[name]) if isinstance(branch, dict) else branch
        for name, branch in gradients.items()
    }
    for name, source in copies_in(summed, sources):
        summed[source][A] += summed[name][A]
        summed[name][A] = jnp.zeros_like(summed[name][A])
    return summed


def update_copies(weights: Tree, sources: Tree) -> Tree:
    """Weights with the values of their sources in the copies."""
    updated = {
        name: update_copies(branch, sources[name]) if isinstance(branch, dict) else branch
        for name, branch in weights.items()
    }
    for name, source in copies_in(updated, sources):
        updated[name][A] = updated[source][A]
    return updated


def copies_in(branch: Tree, sources: Tree) -> list[tuple[str, str]]:
    """(copy, source) of the modules in a branch of a tree."""
    modules = {name: sources[name] for name in branch if isinstance(sources[name], dict)}
    return [(name, module[A]) for name, module in modules.items() if isinstance(module.get(A), str)]


def init_magnitudes(template: Template, weights: Tree) -> Tree:
    """The weights with each `lora_magnitude` set to the norms of its weight, as a new DoRA adapter
    starts. To be called under jit."""

    def visit(branch: Tree, contracted: Tree, axes: Tree) -> Tree:
        if not isinstance(branch, dict):
            return branch
        result = {name: visit(branch[name], contracted[name], axes[name]) for name in branch}
        if MAGNITUDE in branch:
            weight = branch["weight"].astype(branch[MAGNITUDE].dtype)
            norms = jnp.sqrt(jnp.sum(jnp.square(weight), axis=contracted["weight"]))
            names = [name for i, name in enumerate(axes["weight"]) if i not in contracted["weight"]]
            if "layers" in names:
                target = axes[MAGNITUDE].index("layers")
                norms = jnp.moveaxis(norms, names.index("layers"), target)
            result[MAGNITUDE] = norms
        return result

    return visit(weights, template.contracted, template.axes)
