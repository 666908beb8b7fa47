"""Linear layers and their implementations, and the order of their gradients.

Shapes: K = prod(in_shape) inputs, N outputs, of all packed projections together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from maxtext.common.trees import flatten_dict, unflatten_dict
from maxtext.common.types import Tree
from maxtext.kernels.decode import gemv
from maxtext.kernels.fp8.quantize import sum_products
from maxtext.kernels.quantized_matmul import quantized_matmul
from maxtext.kernels.weight_matmul import transposed_matmul, weight_matmul
from maxtext.kernels.weight_only import QuantizedWeight
from maxtext.layers.adapters import LayerAdapter, adapter_inputs
from maxtext.layers.context import INFERENCE, BuildContext, choose
from maxtext.layers.lora import (
    LowRank,
    PackedAdapter,
    down_project,
    has_dropout,
    packed_a,
    split_columns,
)
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.weight_layout import (
    WeightLayout,
    is_transposed,
    pack,
    packing_unsupported_reason,
    source_paths,
)


@dataclass(frozen=True)
class LinearSpec:
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axes of the weight [*in_shape, *out_shape]
    dtype: DTypeLike
    bias: bool = False
    exact: bool = False  # computed in `dtype`, whatever the precision of the context is
    adapter: LayerAdapter | None = None


def quantizes_rows(spec: LinearSpec, context: BuildContext) -> bool:
    """Whether many rows are quantized to multiply them by a quantized weight."""
    return not spec.exact and context.eight_bit_unsupported_reason(spec.dtype) is None


class Linear(nnx.Module):
    """y [..., *out_shape] = x [..., *in_shape] weight + bias.

    The weight is stored in the dtype of the parameters and cast to that of the computation; it may
    be `QuantizedWeight`.
    """

    name = "plain"
    mode: str | None = None
    # Whether `matmuls` takes weights of other widths, such as the A of an adapter.
    takes_any_weight = True

    @classmethod
    def unsupported_reason(cls, spec: LinearSpec, context: BuildContext) -> str | None:
        return None

    @property
    def low_rank(self) -> LowRank | None:
        """The adapter of the layer."""
        return None

    def __init__(self, initializer: Initializer, spec: LinearSpec):
        self.spec = spec
        self.dtype = spec.dtype
        self.input_dims = len(spec.in_shape)
        self.context = initializer.context
        self.quantize_rows = quantizes_rows(spec, self.context)
        self.weight = initializer.weight(
            "weight",
            spec.in_shape,
            spec.out_shape,
            spec.axes,
            contracted=range(self.input_dims),
            # An adapter is added to the weight as it is stored.
            cast_to=None if spec.adapter else spec.dtype,
        )
        bias_axes = spec.axes[self.input_dims :]
        self.bias = initializer.constant(spec.out_shape, 0.0, bias_axes) if spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return project(x, self)[0]

    def matmuls(self, x: jax.Array, weights: Sequence[Tree]) -> list[jax.Array]:
        """x times each weight; all are of layers like this one."""
        if len(weights) > 2 and not any_quantized(weights):
            pairs = zip(copies(x, len(weights)), weights, strict=True)
            return [weight_matmul(x, [w], self.input_dims, self.dtype)[0] for x, w in pairs]
        platform = self.context.only_platform
        return weight_matmul(x, weights, self.input_dims, self.dtype, platform, self.quantize_rows)

    def merged_weight(self) -> jax.Array:
        """The weight, with the layer's adapter in it if it has one."""
        return self.weight[...]


class LoRALinear(LowRank, Linear):
    """A linear layer with a low-rank adapter, see lora.py."""

    name = "LoRA"

    @classmethod
    def unsupported_reason(cls, spec: LinearSpec, context: BuildContext) -> str | None:
        return None if spec.adapter else "has no adapter"

    def __init__(self, initializer: Initializer, spec: LinearSpec):
        super().__init__(initializer, spec)
        assert spec.adapter is not None
        self.init_adapter(
            initializer,
            spec.adapter,
            in_shape=spec.in_shape,
            out_shape=spec.out_shape,
            axes=spec.axes,
            dtype=spec.dtype,
            weight=self.weight[...],
        )

    @property
    def low_rank(self) -> LowRank:
        return self

    def merged_weight(self) -> jax.Array:
        return self.merge(self.weight[...], adapter_inputs())


class QuantizedMatmulLinear(Linear):
    """Quantizes both operands on the fly and multiplies them in fp8 or int8, forward and
    backward.
    """

    name = "quantized matmul"
    takes_any_weight = False

    @classmethod
    def unsupported_reason(cls, spec: LinearSpec, context: BuildContext) -> str | None:
        if not context.precision:
            return "quantization is not set"
        return "computed exactly" if spec.exact else None

    def matmuls(self, x: jax.Array, weights: Sequence[Tree]) -> list[jax.Array]:
        context = self.context
        outputs = quantized_matmul(
            x,
            tuple(weights),
            self.input_dims,
            context.precision,
            self.dtype,
            context.only_platform,
        )
        return list(outputs)


class TransposedLinear(Linear):
    """Stores the weight as [N, K]: decode steps of few rows are memory-bound and read each output's
    inputs contiguously (GEMV), as 8-bit matmuls of many rows do.
    """

    name = "transposed"
    mode = INFERENCE
    takes_any_weight = False

    @classmethod
    def unsupported_reason(cls, spec: LinearSpec, context: BuildContext) -> str | None:
        if context.decode_rows != 1 and not context.quantized_weights:
            return "several rows are decoded at a time"
        return packing_unsupported_reason(context)

    def __init__(self, initializer: Initializer, spec: LinearSpec):
        super().__init__(initializer, spec)
        layout = WeightLayout((), spec.in_shape, (spec.out_shape,), transposed=True)
        self.weight = layout.weight(initializer.dtype)
        use_gemv = layout.use_gemv(initializer.dtype, spec.dtype, self.context)
        self.multiply = TransposedMatmul(use_gemv, self.context.only_platform, self.quantize_rows)

    def matmuls(self, x: jax.Array, weights: Sequence[Tree]) -> list[jax.Array]:
        batch = x.shape[: x.ndim - self.input_dims]
        x = x.astype(self.dtype).reshape(*batch, -1)
        return [self.multiply(x, w).reshape(*batch, *self.spec.out_shape) for w in weights]

    def merged_weight(self) -> jax.Array:
        weight_T = self.weight[...].astype(self.dtype)
        return weight_T.T.reshape(*self.spec.in_shape, *self.spec.out_shape)


class PackedLinear(nnx.Module):
    """[y_1, …] = x [w_1 …] + [b_1 …]: projections of one input by one matmul, for inference.

    The weight is [K, N], or [N, K] as in `TransposedLinear`. Its values come from `pack_weights` or
    `pack_projections`.
    The adapters of the projections are packed as well, see `PackedAdapter`.
    """

    def __init__(
        self,
        initializer: Initializer,
        names: Sequence[str],
        *,
        in_shape: Sequence[int],
        out_shapes: Sequence[Sequence[int]],
        dtype: DTypeLike,
        bias: bool = False,
    ):
        self.layout = WeightLayout(
            names=tuple(names),
            in_shape=tuple(in_shape),
            out_shapes=tuple(map(tuple, out_shapes)),
            transposed=is_transposed(initializer.context),
        )
        self.dtype = dtype
        context = initializer.context
        self.multiply = TransposedMatmul(
            self.layout.use_gemv(initializer.dtype, dtype, context),
            context.only_platform,
            context.eight_bit_unsupported_reason(dtype) is None,
        )
        self.weight = self.layout.weight(initializer.dtype)
        self.bias = self.layout.bias(initializer.dtype) if bias else None
        self.adapter = PackedAdapter.of(initializer, self.layout)
        if self.adapter is not None:
            self.lora_a, self.lora_b = self.adapter.params(dtype)

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """The output of each projection."""
        batch = x.shape[: x.ndim - len(self.layout.in_shape)]
        parts = jnp.split(self.matmul(x), self.layout.splits, axis=-1)
        shapes = self.layout.out_shapes
        return [part.reshape(*batch, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def matmul(self, x: jax.Array) -> jax.Array:
        """The outputs of all projections, [..., N]."""
        x = x.reshape(*x.shape[: x.ndim - len(self.layout.in_shape)], -1)
        weight = self.weight[...]
        if not isinstance(weight, QuantizedWeight):
            weight = weight.astype(self.dtype)
        y = self.multiply(x, weight) if self.layout.transposed else x @ weight
        if self.adapter is not None:
            a, b = (factor[...].astype(self.dtype) for factor in (self.lora_a, self.lora_b))
            hidden = self.adapter.select(x @ a, adapter_inputs().ids)
            y = y if hidden is None else y + hidden @ b
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def pack_projections(template: Template, weights: Tree) -> Tree:
    """Weights of the same model with separate projections, in the layout of `template`. To be
    called under jit."""
    flat, packed = flatten_dict(weights), {}
    for path, variable in nnx.to_flat_state(template.state):
        metadata = variable.get_metadata()
        layout, adapter = metadata.get("layout"), metadata.get("packed")
        if adapter is not None:
            factors = [flat.get(source) for source in source_paths(path, adapter.names)]
            packed[path] = adapter.pack(path[-1], factors)
        elif layout is not None:
            packed[path] = pack(path, layout, flat)
        else:
            packed[path] = flat[path]
    return unflatten_dict(packed)


@dataclass(frozen=True)
class TransposedMatmul:
    """x [..., K] times weight_T [N, K], an array or a QuantizedWeight."""

    use_gemv: bool
    platform: str | None
    quantize_rows: bool

    def __call__(self, x: jax.Array, weight_T: jax.Array | QuantizedWeight) -> jax.Array:
        if isinstance(weight_T, QuantizedWeight):
            return transposed_matmul(x, weight_T, self.platform, self.quantize_rows)
        batch = x.shape[:-1]
        if self.use_gemv and math.prod(batch) == 1 and x.dtype == weight_T.dtype:
            return gemv.gemv(x.reshape(-1), weight_T).reshape(*batch, -1)
        return x @ weight_T.T


LINEARS: tuple[type[Linear], ...] = (
    LoRALinear,
    TransposedLinear,
    QuantizedMatmulLinear,
    Linear,
)


def build_linear(
    initializer: Initializer,
    name: str,
    *,
    in_shape: Sequence[int],
    out_shape: Sequence[int],
    axes: Sequence[str | None],
    dtype: DTypeLike,
    bias: bool = False,
    exact: bool = False,
) -> Linear:
    """The linear layer `name` of a module, by the implementation that its context asks for."""
    initializer = initializer.child(name)
    adapters = initializer.context.adapters
    spec = LinearSpec(
        in_shape=tuple(in_shape),
        out_shape=tuple(out_shape),
        axes=tuple(axes),
        dtype=dtype,
        bias=bias,
        exact=exact,
        adapter=None if adapters is None else adapters.at(initializer.paths),
    )
    choice = choose(LINEARS, spec, initializer.context)
    return choice.implementation(initializer, spec)


def project(x: jax.Array, *linears: Linear, weight_grads_first: bool = False) -> list[jax.Array]:
    """The output of each linear layer. All have the same input and dtype, and the same
    implementation but for adapters.

    `weight_grads_first` orders the backward pass, see `order_weight_grads`.
    """
    first = linears[0]
    # Cast first, so that gradients are in the dtype of the matmul and not in the parameters'.
    weights = [
        weight if isinstance(weight, QuantizedWeight) else weight.astype(first.dtype)
        for weight in (linear.weight[...] for linear in linears)
    ]
    if weight_grads_first:
        x, weights = order_weight_grads(x, weights)
    adapted = [linear.low_rank for linear in linears if linear.low_rank is not None]
    inputs = adapter_inputs()
    takes_a = first.takes_any_weight and not any_quantized(weights)
    if adapted and takes_a and not has_dropout(adapted, inputs):
        # A is the first of the weights: in the backward pass, the large matmuls then add to its
        # product, at no cost, and not the other way round.
        hidden, *outputs = first.matmuls(x, [packed_a(adapted), *weights])
        hiddens = split_columns(hidden, adapted)
    else:
        outputs, hiddens = first.matmuls(x, weights), down_project(x, adapted, inputs)
    outputs = add_adapters(outputs, hiddens, linears)
    return [
        y if linear.bias is None else y + linear.bias[...].astype(linear.dtype)
        for y, linear in zip(outputs, linears, strict=True)
    ]


def any_quantized(weights: Sequence[jax.Array | QuantizedWeight]) -> bool:
    return any(isinstance(weight, QuantizedWeight) for weight in weights)


def add_adapters(
    outputs: Sequence[jax.Array], hiddens: Sequence[jax.Array], linears: Sequence[Linear]
) -> list[jax.Array]:
    """The outputs of linear layers for x, with the updates of those that have adapters, by x A of
    each of these."""
    inputs, hidden = adapter_inputs(), iter(hiddens)
    return [
        linear.low_rank.add_update(next(hidden), y, linear.weight[...], inputs)
        if linear.low_rank is not None
        else y
        for y, linear in zip(outputs, linears, strict=True)
    ]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copies(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """x for `count` matmuls. The backward pass adds their gradients in the order in which XLA for
    GPUs can fuse each addition into a matmul; autodiff's own order leaves one as a separate
    pass."""
    return (x,) * count


copies.defvjp(
    lambda x, count: ((x,) * count, None),
    lambda count, residuals, grads: (sum_products(grads),),
)


@jax.custom_jvp
def order_weight_grads(x: Tree, weights: Tree) -> tuple[Tree, Tree]:
    """Both unchanged. In the backward pass, dw is computed before dx is used.

    A compiler may postpone dw, which nothing waits for, and keep the activations that it needs
    alive until then: for the weight of the head, the gradient of all logits through the whole
    backward pass of the layers.
    """
    return x, weights


def ordered_tangents(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    """The transpose of a barrier is a barrier: only the backward pass has one. Frozen weights need
    no gradient.
    """
    leaves, tree = jax.tree.flatten(tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    moving = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, SymbolicZero)]
    if len(moving) > 1:
        barred = jax.lax.optimization_barrier([leaves[i] for i in moving])
        for i, leaf in zip(moving, barred, strict=True):
            leaves[i] = leaf
    return order_weight_grads(*primals), jax.tree.unflatten(tree, leaves)


order_weight_grads.defjvp(ordered_tangents, symbolic_zeros=True)
