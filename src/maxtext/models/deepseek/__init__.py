"""DeepSeek 2, 3 and 3.2, and Kimi K2."""

from maxtext.models.deepseek import hf, layers
from maxtext.models.family import Family

FAMILIES = (Family("deepseek", layers.deepseek, hf=hf.MAPPINGS),)
