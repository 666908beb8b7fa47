"""Phi-3 and Phi-4."""

from maxtext.models.family import Family
from maxtext.models.phi import hf, layers

FAMILIES = (Family("phi3", layers.phi3, hf=(hf.PHI3,)),)
