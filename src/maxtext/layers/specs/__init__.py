"""Specs of layers: what a model consists of, without JAX."""

from maxtext.layers.specs.attention import AttentionSpec, IndexerSpec, MlaSpec, Moba, Temperature
from maxtext.layers.specs.engram import Compression, EngramSpec
from maxtext.layers.specs.gated_delta_net import GatedDeltaNetSpec
from maxtext.layers.specs.layer import HyperConnectionSpec, LayerSpec, Segment, segments_of
from maxtext.layers.specs.mlp import ACTIVATION_NAMES, MlpSpec, MoeSpec, RouterSpec
from maxtext.layers.specs.norm import NormSpec
from maxtext.layers.specs.rope import RopeSpec
from maxtext.layers.specs.spec import IMPLEMENTATION, MixerSpec, Spec

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
