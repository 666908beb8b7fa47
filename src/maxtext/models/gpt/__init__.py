"""GPT-2 and GPT-3."""

from maxtext.models.family import Family
from maxtext.models.gpt import hf, layers

FAMILIES = (Family("gpt3", layers.gpt3, hf=(hf.GPT2,)),)
