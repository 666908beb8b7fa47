"""Cohere's Command models."""

from maxtext.models.cohere import hf, layers
from maxtext.models.family import Family

FAMILIES = (
    Family("cohere", layers.cohere, hf=(hf.COHERE,)),
    Family("cohere2", layers.cohere2, hf=(hf.COHERE2,)),
)
