"""The decoder stack: runs any pattern of layers, scanned over its repeats or unrolled, with
rematerialization.

A model is a list of segments; a segment is a pattern of layer specs that repeats. Weights of layer
i come from stream i of the model's randomness, so they are the same whether a segment is scanned
(one weight a spec, stacked over the repeats) or unrolled (one weight a layer).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.attention import cudnn
from maxtext.layers.inputs import Aux, Cache, LayerInputs
from maxtext.layers.parameters import Initializer, alike, slices, stack
from maxtext.sharding.explicit import auto_sharded
from maxtext.sharding.state import to_device

# What passes between layers, [B, S, E] or several streams of it: its logical axes, by the number of
# dimensions.
STREAM = {
    3: ("activation_batch", "activation_norm_length", "activation_embed"),
    4: ("activation_batch", "activation_norm_length", None, "activation_embed"),
}


class Spec(Protocol):
    def build(self, initializer: Initializer, dtype: Any) -> nnx.Module: ...


@dataclass(frozen=True)
class Segment:
    pattern: tuple[Any, ...]  # of Spec
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.repeats


LONGEST_PATTERN = 16
RESULTS_OF_ATTENTION = {"context", "attention_out"}  # the names of what it gives


def segments_of(layers: Sequence[Spec], cycle: int = 1) -> list[Segment]:
    """Layers as patterns that repeat: at each place the pattern that covers most of what follows,
    the shortest of equals. A pattern whose length divides `cycle` is repeated to that length, which
    is what a step of the scan runs."""
    segments, place = [], 0
    while place < len(layers):
        rest = layers[place:]
        best = (1, 1)  # length, repeats
        for length in range(1, min(LONGEST_PATTERN, len(rest) // 2) + 1):
            repeats = 1
            while rest[repeats * length : (repeats + 1) * length] == rest[:length]:
                repeats += 1
            if repeats > 1 and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        times = cycle // length if cycle % length == 0 else 1
        if 1 < times <= repeats:
            length, repeats = cycle, repeats // times
        segments.append(Segment(tuple(rest[:length]), repeats))
        place += length * repeats
    return segments


@dataclass(frozen=True)
class RematPolicy:
    """Names of tensors that are kept on the device or moved to the host; everything else is
    computed again.
    """

    kept: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    def wrap(self, function: Callable, in_scan: bool) -> Callable:
        named = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.kept),
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
        attended = not RESULTS_OF_ATTENTION.isdisjoint(self.kept)

        def policy(primitive: Any, *arguments: Any, **options: Any) -> Any:
            return (attended and primitive.name == cudnn.FORWARD_PRIMITIVE) or named(
                primitive, *arguments, **options
            )

        # Inside a loop, XLA cannot merge the two computations of a tensor; elsewhere it has to be
        # kept from it.
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_scan)


def build(spec: Spec, dtype: Any, initializer: Initializer) -> nnx.Module:
    return spec.build(initializer, dtype)


class Stack(nnx.Module):
    """The layers of one segment. `scanned` and `axis` say how their weights are kept."""

    def __init__(
        self,
        initializer: Initializer,
        segment: Segment,
        first: int,
        dtype: Any,
        scanned: bool,
        axis: int,
        remat: RematPolicy | None,
        on_host: bool = False,
    ):
        self.segment, self.first, self.scanned, self.axis, self.remat = (
            segment,
            first,
            scanned,
            axis,
            remat,
        )
        self.on_host = (
            on_host  # weights live in host memory and come to the device with their layer
        )
        width = len(segment.pattern)
        blocks: list[Any] = []
        for place, spec in enumerate(segment.pattern):
            initializers = [
                initializer.child(f"layer_{first + repeat * width + place}")
                for repeat in range(segment.repeats)
            ]
            if scanned:
                blocks.append(stack(partial(build, spec, dtype), initializers, axis))
            else:
                blocks.append(nnx.List(alike(partial(build, spec, dtype), initializers)))
        self.blocks: Any = nnx.List(blocks)

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict[int, Aux]]:
        """The stream after these layers, and by place in the pattern what its layers report,
        [repeats, ...].
        """
        return self.scan(x, inputs) if self.scanned else self.unroll(x, inputs)

    def unroll(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict[int, Aux]]:
        reports: dict[int, list[Aux]] = {place: [] for place in range(len(self.blocks))}
        programs: list[Any] = [
            partial(self.apply, nnx.split(layers[0])[0]) for layers in self.blocks
        ]
        if self.segment.repeats > 1 and isinstance(x, jax.core.Tracer):
            # As part of a program, layers of one place are the same one: it is traced once, and
            # called.
            programs = list(map(jax.jit, programs))
        for repeat in range(self.segment.repeats):
            for place, (layers, program) in enumerate(zip(self.blocks, programs, strict=True)):
                index = self.first + repeat * len(self.segment.pattern) + place
                x, aux = program(nnx.split(layers[repeat])[1], x, inputs.fold(index))
                reports[place].append(aux)
        return x, {
            place: jax.tree.map(lambda *each: jnp.stack(each), *auxes)
            for place, auxes in reports.items()
        }

    def scan(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict[int, Aux]]:
        graphs, states = zip(*(slices(layer, self.axis) for layer in self.blocks), strict=True)

        def body(
            x: jax.Array, step: tuple[jax.Array, Sequence[nnx.State]]
        ) -> tuple[jax.Array, dict[int, Aux]]:
            repeat, weights = step
            reports = {}
            for place, (graph, state) in enumerate(zip(graphs, weights, strict=True)):
                index = self.first + repeat * len(graphs) + place
                x, reports[place] = self.apply(graph, state, x, inputs.fold(index))
            return x, reports

        return jax.lax.scan(body, x, (jnp.arange(self.segment.repeats), states))

    def step(
        self, x: jax.Array, inputs: LayerInputs, caches: Sequence[Cache]
    ) -> tuple[jax.Array, list[Cache]]:
        """The stream after these layers, one after the other, each with its cache, and the caches
        extended.
        """
        after = []
        for index in range(self.segment.layers):
            repeat, place = divmod(index, len(self.segment.pattern))
            if self.scanned:
                graph, stacked = slices(self.blocks[place], self.axis)
                layer = nnx.merge(graph, jax.tree.map(lambda value: value[repeat], stacked))  # noqa: B023 - used at once
            else:
                layer = self.blocks[place][repeat]
            x, aux = layer(x, replace(inputs, cache=caches[index]))
            after.append(aux["cache"])
        return x, after

    def apply(
        self, graph: nnx.GraphDef, state: nnx.State, x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        def run(state: nnx.State, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
            if self.on_host:
                state = to_device(state)
            return auto_sharded(layer, state, x, inputs, out_axes=STREAM[x.ndim], has_aux=True)

        def layer(state: nnx.State, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
            return nnx.merge(graph, state)(x, inputs)

        looped = self.scanned and self.segment.repeats > 1  # XLA unrolls a loop of one
        function = self.remat.wrap(run, looped) if self.remat else run
        return function(state, x, inputs)
