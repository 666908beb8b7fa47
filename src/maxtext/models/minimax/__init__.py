"""MiniMax M2."""

from maxtext.models.family import Family
from maxtext.models.minimax import hf, layers

FAMILIES = (Family("minimax_m2", layers.minimax_m2, hf=(hf.MINIMAX_M2,)),)
