"""Which family a decoder_block is of: the function that lists its layers, and what differs outside
of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxtext.configs.types import MaxTextConfig
from maxtext.layers.stack import Segment, segments_of
from maxtext.models import deepseek, gemma, gpt, gpt_oss, llama, mixtral, olmo, qwen, simple
from maxtext.models.common import with_engrams


@dataclass(frozen=True)
class Family:
    layers: Callable[[Any], list[Any]]  # a spec for each layer of a configuration
    scaled_embedding: bool = False  # embeddings times the root of their width


FAMILIES: dict[str, Family] = {
    "default": Family(llama.default),
    "llama2": Family(llama.llama),
    "llama4": Family(llama.llama4),
    "mistral": Family(llama.mistral),
    "mixtral": Family(mixtral.mixtral),
    "gemma": Family(gemma.gemma, scaled_embedding=True),
    "gemma2": Family(gemma.gemma2, scaled_embedding=True),
    "gemma3": Family(gemma.gemma3, scaled_embedding=True),
    "gemma4": Family(gemma.gemma4, scaled_embedding=True),
    "qwen2": Family(qwen.qwen2),
    "qwen3": Family(qwen.qwen3),
    "qwen3_moe": Family(qwen.qwen3_moe),
    "qwen3_custom_moe": Family(qwen.qwen3_custom_moe),
    "qwen3_next": Family(qwen.qwen3_next),
    "qwen3_5": Family(qwen.qwen3_5),
    "deepseek": Family(deepseek.deepseek),
    "gpt_oss": Family(gpt_oss.gpt_oss),
    "olmo3": Family(olmo.olmo3),
    "gpt3": Family(gpt.gpt3),
    "simple": Family(simple.simple),
    "simple_mlp": Family(simple.simple_mlp),
}


def family(config: MaxTextConfig) -> Family:
    return FAMILIES[config.decoder_block.value]


def layers(config: MaxTextConfig) -> list[Any]:
    """The spec of each layer of a model."""
    return with_engrams(config, family(config).layers(config))


def segments(config: MaxTextConfig) -> list[Segment]:
    """The layers of a model as patterns that repeat."""
    return segments_of(layers(config), config.inhomogeneous_layer_cycle_interval)
