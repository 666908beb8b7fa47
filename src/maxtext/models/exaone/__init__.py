"""EXAONE 4."""

from maxtext.models.exaone import hf, layers
from maxtext.models.family import Family

FAMILIES = (Family("exaone4", layers.exaone4, hf=(hf.EXAONE4,)),)
