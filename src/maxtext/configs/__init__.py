"""Level 1: the configuration: defaults in base.yml, typed keys, merging, derived values, checks."""

from maxtext.configs.types import MaxTextConfig

__all__ = ["MaxTextConfig"]
