"""Which function makes the layers of a decoder_block."""

from collections.abc import Callable
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.layers.stack import Segment
from maxtext.models import gpt, llama, simple

BLOCKS: dict[str, Callable[[Any], list[Segment]]] = {
    "default": llama.default,
    "llama2": llama.llama,
    "mistral": llama.mistral,
    "gpt3": gpt.gpt3,
    "simple": simple.simple,
    "simple_mlp": simple.simple_mlp,
}


def segments(config: Any) -> list[Segment]:
    """The layers of a model."""
    block = config.decoder_block.value
    if block not in BLOCKS:
        raise ConfigError(
            f"decoder_block={block} ({config.source('decoder_block')}) is not in this version yet: "
            f"use {', '.join(BLOCKS)}"
        )
    return BLOCKS[block](config)
