"""ERNIE 4.5."""

from maxtext.models.ernie import hf, layers
from maxtext.models.family import Family

FAMILIES = (Family("ernie4_5", layers.ernie4_5, hf=(hf.ERNIE4_5,)),)
