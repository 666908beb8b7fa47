"""Mistral and Mixtral."""

from maxtext.models.family import Family
from maxtext.models.mistral import hf, layers

FAMILIES = (
    Family("mistral", layers.mistral, hf=(hf.MISTRAL,)),
    Family("mixtral", layers.mixtral, hf=(hf.MIXTRAL,)),
)
