"""Level 4: the families, each a pattern of layers, and the model that embeds, runs the pattern, and
scores tokens.
"""

from maxtext.models.registry import segments
from maxtext.models.transformer import Transformer, make_template

__all__ = ["Transformer", "make_template", "segments"]
