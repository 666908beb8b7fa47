"""Specs of layers: what a model consists of, without JAX."""

from maxtext.layers.specs.attention import AttentionSpec, IndexerSpec, MlaSpec, Moba, Temperature
from maxtext.layers.specs.layer import (
    ACTIVATION_NAMES,
    Compression,
    EngramSpec,
    GatedDeltaNetSpec,
    HyperConnectionSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RouterSpec,
    Segment,
    segments_of,
)
from maxtext.layers.specs.spec import IMPLEMENTATION, MixerSpec, NormSpec, RopeSpec, Spec

__all__ = [
    "ACTIVATION_NAMES",
    "IMPLEMENTATION",
    "AttentionSpec",
    "Compression",
    "EngramSpec",
    "GatedDeltaNetSpec",
    "HyperConnectionSpec",
    "IndexerSpec",
    "LayerSpec",
    "MixerSpec",
    "MlaSpec",
    "MlpSpec",
    "Moba",
    "MoeSpec",
    "NormSpec",
    "RopeSpec",
    "RouterSpec",
    "Segment",
    "Spec",
    "Temperature",
    "segments_of",
]
