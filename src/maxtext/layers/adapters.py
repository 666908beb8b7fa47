"""Which layers of a model have low-rank adapters (LoRA), and what a layer needs to apply them.

An adapter adds scale · B(A x) to the output of a linear layer, scale = alpha / rank, or alpha /
sqrt(rank) with rslora. `AdapterSpec` lists the layers by the native path of their weights, as
"layers/3/attention/query". A model that is built with one (`BuildContext.adapters`) has the
parameters `lora_a`, `lora_b` and, with DoRA, `lora_magnitude` next to these weights; all others are
frozen.

Layers of a stack share one module, so those that lack an adapter, or have one of a lower rank, are
padded: zeros in A and B have no gradient, and a scale of zero has no effect.

Layers that are one module of the Hugging Face model, as query, key and value of Phi-3's qkv_proj,
share A: the others have copies of that of the first, which training keeps equal.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import jax

if TYPE_CHECKING:
    from maxtext.layers.inputs import LayerInputs

HEAD, EMBEDDER = "head", "embedder"  # paths of modules outside the layers
KAIMING, GAUSSIAN = "kaiming", "gaussian"


@dataclass(frozen=True)
class AdapterTarget:
    """The adapter of one linear layer."""

    rank: int
    alpha: float


@dataclass(frozen=True)
class LayerAdapter:
    """The adapters of one module, which may stand for several stacked layers."""

    spec: "AdapterSpec"
    rank: int  # the largest of the stacked layers
    scales: tuple[float, ...]  # of each stacked layer; 0: the layer has no adapter

    @property
    def slots(self) -> int:
        return self.spec.slots


@dataclass(frozen=True)
class AdapterSpec:
    """The adapters of a model.

    `saved` are modules (head, embedder) that are trained in full together with adapters, PEFT's
    modules_to_save. `shared` are the paths of sibling layers with one A. With `slots`, the model
    serves that many adapters at a time: its parameters hold all of them (see lora.py), and each
    sequence has the index of its adapter, counted from 1.
    """

    targets: tuple[tuple[str, AdapterTarget], ...]
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    init: str = KAIMING
    dtype: str = "float32"
    saved: tuple[str, ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    slots: int = 0

    @cached_property
    def by_path(self) -> dict[str, AdapterTarget]:
        return dict(self.targets)

    def scale(self, target: AdapterTarget) -> float:
        return target.alpha / (math.sqrt(target.rank) if self.rslora else target.rank)

    def at(self, paths: Sequence[str]) -> LayerAdapter | None:
        """The adapter of the module at these paths, one for each stacked layer; None if no layer
        has one."""
        targets = [self.by_path.get(path) for path in paths]
        if not any(targets):
            return None
        rank = max(target.rank for target in targets if target)
        scales = tuple(0.0 if target is None else self.scale(target) for target in targets)
        return LayerAdapter(self, rank, scales)

    @cached_property
    def source_by_path(self) -> dict[str, str]:
        """The name of the sibling that A of a layer is a copy of, by the path of the layer."""
        return {path: group[0].rpartition("/")[2] for group in self.shared for path in group[1:]}

    def source(self, paths: Sequence[str]) -> str | None:
        """The source of the module at these paths; None if its A is its own."""
        sources = (self.source_by_path.get(path) for path in paths)
        return next((source for source in sources if source), None)

    def saves(self, path: str) -> bool:
        """Whether the parameter at this path belongs to a module that is trained in full."""
        return any(path == module or path.startswith(f"{module}/") for module in self.saved)


class AdapterInputs(NamedTuple):
    """The inputs of a layer that its adapters read."""

    ids: jax.Array | None = None  # of the adapter of each row [B] or token [B, S]; 0: none
    key: jax.Array | None = None  # of dropout; None: no dropout
    repeat: jax.Array | int | None = None  # the index of the layer in its stack


NO_INPUTS = AdapterInputs()
CURRENT: ContextVar[AdapterInputs] = ContextVar("adapter_inputs", default=NO_INPUTS)


@contextlib.contextmanager
def use_adapter_inputs(inputs: "LayerInputs | AdapterInputs") -> Iterator[None]:
    """While a layer is traced, its linear layers read these inputs."""
    if not isinstance(inputs, AdapterInputs):
        inputs = AdapterInputs(inputs.adapter_ids, inputs.key, inputs.repeat)
    token = CURRENT.set(inputs)
    try:
        yield
    finally:
        CURRENT.reset(token)


def adapter_inputs() -> AdapterInputs:
    return CURRENT.get()
