"""SmolLM3."""

from maxtext.models.family import Family
from maxtext.models.smollm3 import hf, layers

FAMILIES = (Family("smollm3", layers.smollm3, hf=(hf.SMOLLM3,)),)
