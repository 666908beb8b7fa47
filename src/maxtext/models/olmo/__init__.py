"""OLMo."""

from maxtext.models.family import Family
from maxtext.models.olmo import hf, layers

FAMILIES = (
    Family("olmo2", layers.olmo2, hf=(hf.OLMO2,)),
    Family("olmo3", layers.olmo3, hf=(hf.OLMO3,)),
)
