"""Level 1: one YAML file of defaults, its types, how layers merge, and what follows from them."""

from maxtext.configs.load import config, load
from maxtext.configs.types import MaxTextConfig

__all__ = ["MaxTextConfig", "config", "load"]
