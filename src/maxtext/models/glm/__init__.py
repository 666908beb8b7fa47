"""GLM-4.5 and 4.6."""

from maxtext.models.family import Family
from maxtext.models.glm import hf, layers

FAMILIES = (Family("glm4_moe", layers.glm4_moe, hf=(hf.GLM4_MOE,)),)
