"""The families: every folder of `models/` lists its own in FAMILIES."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.specs import Segment, segments_of
from maxtext.models.common import with_engrams
from maxtext.models.family import Family


def find_families() -> dict[str, Family]:
    """decoder_block -> family, from the packages of this folder."""
    packages = [
        importlib.import_module(f"{__package__}.{module.name}")
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
        if module.ispkg
    ]
    return {family.decoder_block: family for package in packages for family in package.FAMILIES}


FAMILIES = find_families()


def family(config: MaxTextConfig) -> Family:
    return FAMILIES[config.decoder_block.value]


def layers(config: MaxTextConfig) -> list[Any]:
    """The spec of each layer of a model."""
    return with_engrams(config, family(config).layers(config))


def segments(config: MaxTextConfig) -> list[Segment]:
    """The layers of a model as patterns that repeat."""
    return segments_of(layers(config), config.inhomogeneous_layer_cycle_interval)
