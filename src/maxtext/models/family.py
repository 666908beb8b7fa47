"""The record of a model family: its layers, and its Hugging Face mappings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import HfMapping


@dataclass(frozen=True)
class Family:
    decoder_block: str
    layers: Callable[[MaxTextConfig], list[Any]]  # the spec of each layer
    hf: tuple[HfMapping, ...] = ()  # the first whose `matches` holds writes a configuration
    scaled_embedding: bool = False  # embeddings are multiplied by √emb_dim
