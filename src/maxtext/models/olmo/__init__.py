"""OLMo."""

from maxtext.models.family import Family
from maxtext.models.olmo import hf, layers

FAMILIES = (Family("olmo3", layers.olmo3, hf=(hf.OLMO3,)),)
