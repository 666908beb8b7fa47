"""The spec of a decoder layer, and the patterns of specs that repeat in a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from maxtext.layers.specs.engram import EngramSpec
from maxtext.layers.specs.norm import NormSpec
from maxtext.layers.specs.spec import IMPLEMENTATION, Spec

MAX_PATTERN_LENGTH = 16


@dataclass(frozen=True)
class HyperConnectionSpec(Spec):
    module = "maxtext.layers.hyper_connections"

    streams: int  # k, at least 2: one stream is the ordinary residual
    sinkhorn_iterations: int  # normalisations of rows and columns
    norm: NormSpec  # rms

    def __post_init__(self) -> None:
        if self.streams < 2:
            raise ValueError(f"hyper-connections need at least 2 streams, not {self.streams}")
        if self.sinkhorn_iterations < 1:
            raise ValueError(
                f"sinkhorn_iterations must be at least 1, not {self.sinkhorn_iterations}"
            )
        if self.norm.kind != "rms":
            raise ValueError(f"hyper-connections need an rms norm, not {self.norm.kind}")


@dataclass(frozen=True)
class LayerSpec(Spec):
    """`attention` and `mlp` are the specs of any sublayers."""

    module = "maxtext.layers.decoder_layer"

    embed_dim: int
    attention: Any
    mlp: Any
    norm: NormSpec
    parallel: bool = False  # attention and MLP have the same normed input
    attention_norm: bool = True  # a norm on the input of attention
    mlp_norm: bool = True
    post_attention_norm: bool = False  # a norm on the output of attention, before it is added
    post_mlp_norm: bool = False
    scaled: bool = False  # the layer's output times a stored factor that is not trained
    dropout_rate: float = field(default=0.0, metadata=IMPLEMENTATION)
    streams: HyperConnectionSpec | None = None
    engram: EngramSpec | None = None  # a memory of n-grams, added before attention


@dataclass(frozen=True)
class Segment:
    pattern: tuple[Any, ...]  # of Spec
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.repeats


def segments_of(layers: Sequence[Spec], cycle: int = 1) -> list[Segment]:
    """The layers as repeating patterns: from each position the pattern that covers most of the
    rest, the shortest of equals. A pattern whose length divides `cycle` is repeated to that length,
    which is what a step of the scan runs."""
    segments, start = [], 0
    while start < len(layers):
        rest = layers[start:]
        best = (1, 1)  # length, repeats
        for length in range(1, min(MAX_PATTERN_LENGTH, len(rest) // 2) + 1):
            repeats = 1
            while rest[repeats * length : (repeats + 1) * length] == rest[:length]:
                repeats += 1
            if repeats > 1 and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        factor = cycle // length if cycle % length == 0 else 1
        if 1 < factor <= repeats:
            length, repeats = cycle, repeats // factor
        segments.append(Segment(tuple(rest[:length]), repeats))
        start += length * repeats
    return segments
