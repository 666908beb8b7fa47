"""Layers that are nothing but matrix products."""

from maxtext.models.family import Family
from maxtext.models.simple import layers

FAMILIES = (
    Family("simple", layers.simple),
    Family("simple_mlp", layers.simple_mlp),
)
