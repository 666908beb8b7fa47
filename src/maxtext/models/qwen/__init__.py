"""Qwen."""

from maxtext.models.family import Family
from maxtext.models.qwen import hf, layers

FAMILIES = (
    Family("qwen2", layers.qwen2, hf=(hf.QWEN2,)),
    Family("qwen3", layers.qwen3, hf=(hf.QWEN3,)),
    Family("qwen3_moe", layers.qwen3_moe, hf=(hf.QWEN3_MOE,)),
    Family("qwen3_custom_moe", layers.qwen3_custom_moe),
    Family("qwen3_next", layers.qwen3_next, hf=(hf.QWEN3_NEXT,)),
    Family("qwen3_5", layers.qwen3_5, hf=(hf.QWEN3_5_MOE, hf.QWEN3_5)),
)
