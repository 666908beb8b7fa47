"""Llama 2, 3, 3.1 and 3.3, Mistral, and the generic block: pre-norm attention and a gated MLP."""

from typing import Any

from maxtext.layers.stack import Segment
from maxtext.models.common import attention_spec, layer_spec


def llama(config: Any) -> list[Segment]:
    return [Segment((layer_spec(config),), config.num_decoder_layers)]


def mistral(config: Any) -> list[Segment]:
    """Llama with every layer sliding where the checkpoint has a window (the first release had, later ones do not)."""
    kind = "local_sliding" if config.sliding_window_size else None
    return [Segment((layer_spec(config, attention=attention_spec(config, kind)),), config.num_decoder_layers)]


def default(config: Any) -> list[Segment]:
    """Attention and MLP side by side, both reading the same normed input."""
    return [Segment((layer_spec(config, parallel=True),), config.num_decoder_layers)]
