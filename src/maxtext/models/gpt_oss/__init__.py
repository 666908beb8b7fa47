"""gpt-oss."""

from maxtext.models.family import Family
from maxtext.models.gpt_oss import hf, layers

FAMILIES = (Family("gpt_oss", layers.gpt_oss, hf=(hf.GPT_OSS,)),)
