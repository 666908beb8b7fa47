"""Llama."""

from maxtext.models.family import Family
from maxtext.models.llama import hf, layers

FAMILIES = (
    Family("default", layers.default),
    Family("llama2", layers.llama, hf=(hf.LLAMA,)),
    Family("llama4", layers.llama4, hf=(hf.LLAMA4,)),
)
