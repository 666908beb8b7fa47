"""Llama 2, 3, 3.1 and 3.3, Mistral, and the generic block: pre-norm attention and a gated MLP."""

from typing import Any

from maxtext.layers.stack import Segment
from maxtext.models.common import attention_spec, layer_spec, uniform


def llama(config: Any) -> list[Segment]:
    return uniform(config, layer_spec(config))


def mistral(config: Any) -> list[Segment]:
    """Llama with every layer sliding where the checkpoint has a window (the first release had, later ones do not)."""
    kind = "local_sliding" if config.sliding_window_size else None
    return uniform(config, layer_spec(config, attention=attention_spec(config, kind)))


def default(config: Any) -> list[Segment]:
    """Attention and MLP side by side, both reading the same normed input."""
    return uniform(config, layer_spec(config, parallel=True))
