"""The decoder stack: runs any pattern of layers, scanned over its repeats or unrolled, with
rematerialization.

A model is a list of segments; a segment is a pattern of layer specs that repeats. The random
weights of a layer depend on its index in the model, so they are the same whether a segment is
scanned (the weights of a spec are stacked over the repeats) or unrolled (each layer has its own).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.kernels.attention import OUTPUT_PRIMITIVES
from maxtext.layers.adapters import use_adapter_inputs
from maxtext.layers.inputs import Aux, LayerInputs, Sublayer
from maxtext.layers.parameters import Initializer, build_each, build_stacked, layers_first
from maxtext.layers.specs import Segment, Spec
from maxtext.sharding.explicit import auto_sharded
from maxtext.sharding.state import to_device

# Logical axes of the residual between layers, [B, S, E] or [B, S, streams, E], by its rank.
RESIDUAL_AXES = {
    3: ("activation_batch", "activation_norm_length", "activation_embed"),
    4: ("activation_batch", "activation_norm_length", None, "activation_embed"),
}
ATTENTION_OUTPUTS = {"context", "attention_out"}  # rematerialization names of attention's output


@dataclass(frozen=True)
class RematTensors:
    """Names of the intermediates that are saved on the device or offloaded to the host; all others
    are recomputed in the backward pass.
    """

    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    def wrap(self, function: Callable, in_scan: bool) -> Callable:
        by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.saved),
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
        saves_attention = not ATTENTION_OUTPUTS.isdisjoint(self.saved)

        def policy(primitive: Primitive, *args: Any, **options: Any) -> Any:
            if saves_attention and primitive.name in OUTPUT_PRIMITIVES:
                return True
            return by_name(primitive, *args, **options)

        # Inside a loop, XLA cannot merge the two computations of a tensor; elsewhere it must be
        # prevented.
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_scan)


# run(graph, state, x, inputs) -> (residual, aux) of one layer
RunLayer = Callable[[nnx.GraphDef, nnx.State, jax.Array, LayerInputs], tuple[jax.Array, Aux]]


def build(spec: Spec, dtype: DTypeLike, initializer: Initializer) -> Sublayer:
    return spec.build(initializer, dtype)


class Stack(nnx.Module):
    """The layers of one segment. If `scanned`, their weights are stacked along `scan_axis`."""

    def __init__(
        self,
        initializer: Initializer,
        segment: Segment,
        *,
        first_layer: int,
        dtype: DTypeLike,
        scanned: bool,
        scan_axis: int,
        remat: RematTensors | None,
        on_host: bool = False,
    ):
        self.segment = segment
        self.has_adapters = initializer.context.adapters is not None
        self.first_layer = first_layer
        self.scanned = scanned
        self.scan_axis = scan_axis
        self.remat = remat
        self.on_host = (
            on_host  # weights are in host memory, and copied to the device layer by layer
        )
        blocks: list[nnx.Module] = []
        for index, spec in enumerate(segment.pattern):
            initializers = [
                initializer.child(f"layer_{number}", path=str(number))
                for number in (self.layer_index(repeat, index) for repeat in range(segment.repeats))
            ]
            make = partial(build, spec, dtype)
            if scanned:
                blocks.append(build_stacked(make, initializers, scan_axis))
            else:
                blocks.append(nnx.List(build_each(make, initializers)))
        self.blocks: Any = nnx.List(blocks)

    def layer_index(self, repeat: jax.Array | int, index: int) -> jax.Array | int:
        """The index in the model of a layer of the pattern."""
        return self.first_layer + repeat * len(self.segment.pattern) + index

    def layer_inputs(self, inputs: LayerInputs, repeat: jax.Array | int, index: int) -> LayerInputs:
        """The inputs of one layer: with its dropout key and, for adapters, its index in the
        stack."""
        inputs = inputs.fold(self.layer_index(repeat, index))
        return replace(inputs, repeat=jnp.int32(repeat)) if self.has_adapters else inputs

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict[int, Aux]]:
        """The residual after these layers, and by index in the pattern the aux of its layers,
        [repeats, ...].
        """
        return self.scan(x, inputs) if self.scanned else self.unroll(x, inputs)

    def unroll(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict[int, Aux]]:
        auxes: dict[int, list[Aux]] = {index: [] for index in range(len(self.blocks))}
        programs = self.layer_programs(self.apply, x)
        for repeat in range(self.segment.repeats):
            for index, program in enumerate(programs):
                layer_inputs = self.layer_inputs(inputs, repeat, index)
                x, aux = program(self.layer_state(index, repeat), x, layer_inputs)
                auxes[index].append(aux)
        return x, {
            index: jax.tree.map(lambda *values: jnp.stack(values), *by_repeat)
            for index, by_repeat in auxes.items()
        }

    def layer_programs(self, run: RunLayer, x: jax.Array) -> list[Callable[..., Any]]:
        """`run` with the graph of the layers of each index in the pattern: (state, x, inputs) ->
        (residual, aux). Inside a program, these layers are traced once and called."""
        programs: list[Callable[..., Any]] = []
        for layers in self.blocks:
            first = layers if self.scanned else layers[0]
            programs.append(partial(run, nnx.split(first)[0]))
        is_traced = isinstance(x, jax.core.Tracer)
        return list(map(jax.jit, programs)) if self.segment.repeats > 1 and is_traced else programs

    def scan(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict[int, Aux]]:
        graphs, states = zip(
            *(layers_first(layer, self.scan_axis) for layer in self.blocks), strict=True
        )

        def body(
            x: jax.Array, step: tuple[jax.Array, Sequence[nnx.State]]
        ) -> tuple[jax.Array, dict[int, Aux]]:
            repeat, weights = step
            auxes = {}
            for index, (graph, state) in enumerate(zip(graphs, weights, strict=True)):
                layer_inputs = self.layer_inputs(inputs, repeat, index)
                x, auxes[index] = self.apply(graph, state, x, layer_inputs)
            return x, auxes

        return jax.lax.scan(body, x, (jnp.arange(self.segment.repeats), states))

    def step(
        self, x: jax.Array, inputs: LayerInputs, caches: Sequence[Tree]
    ) -> tuple[list[jax.Array], list[Tree]]:
        """The residual after each of these layers, which have a cache each, and the updated
        caches."""
        residuals, updated = [], []
        programs = self.layer_programs(self.extend_cache, x)
        for layer_index in range(self.segment.layers):
            repeat, index = divmod(layer_index, len(self.segment.pattern))
            layer_inputs = self.layer_inputs(inputs, repeat, index)
            layer_inputs = replace(layer_inputs, cache=caches[layer_index])
            x, aux = programs[index](self.layer_state(index, repeat), x, layer_inputs)
            residuals.append(x)
            updated.append(aux["cache"])
        return residuals, updated

    def layer_state(self, index: int, repeat: int) -> nnx.State:
        """The weights of one layer."""
        if not self.scanned:
            return nnx.split(self.blocks[index][repeat])[1]
        _, stacked = layers_first(self.blocks[index], self.scan_axis)
        return jax.tree.map(lambda value: value[repeat], stacked)

    @staticmethod
    def extend_cache(
        graph: nnx.GraphDef, state: nnx.State, x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        layer = nnx.merge(graph, state)
        with use_adapter_inputs(inputs):
            return layer.decode(x, inputs) if x.shape[1] == 1 else layer(x, inputs)

    def apply(
        self, graph: nnx.GraphDef, state: nnx.State, x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        def run(state: nnx.State, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
            if self.on_host:
                state = to_device(state)
            return auto_sharded(
                layer, state, x, inputs, out_axes=RESIDUAL_AXES[x.ndim], has_aux=True
            )

        def layer(state: nnx.State, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
            with use_adapter_inputs(inputs):
                return nnx.merge(graph, state)(x, inputs)

        in_loop = self.scanned and self.segment.repeats > 1  # XLA unrolls a loop of one
        function = self.remat.wrap(run, in_loop) if self.remat else run
        return function(state, x, inputs)
