"""Gemma."""

from maxtext.models.family import Family
from maxtext.models.gemma import hf, layers

FAMILIES = (
    Family("gemma", layers.gemma, hf=(hf.GEMMA,), scaled_embedding=True),
    Family("gemma2", layers.gemma2, hf=(hf.GEMMA2,), scaled_embedding=True),
    Family("gemma3", layers.gemma3, hf=(hf.GEMMA3,), scaled_embedding=True),
    Family("gemma4", layers.gemma4, hf=(hf.GEMMA4,), scaled_embedding=True),
)
