"""The capabilities of the layers of a configuration, computed from their specs.

Rules ask this instead of the name of a decoder_block, so that a new family needs no entry in any
table of features.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, TypeVar

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.types.derived import Architecture
from maxtext.layers.specs import (
    AttentionSpec,
    LayerSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
)
from maxtext.models.common import mixer_kind
from maxtext.models.registry import FAMILIES, layers

Spec = TypeVar("Spec")

PROBE_LAYERS = 12  # enough for every kind of layer in the published patterns


class Capabilities:
    """The layers of a configuration. Raises ConfigError if they cannot be built."""

    def __init__(self, config: MaxTextConfig):
        self.config = config
        self.layers = layers(config)

    @cached_property
    def mixers(self) -> list[Any]:
        return [layer.attention for layer in self.layers if hasattr(layer, "attention")]

    @cached_property
    def has_mixers(self) -> bool:
        """False for stand-ins that consist of matrix products only."""
        return bool(self.mixers)

    @cached_property
    def has_mla(self) -> bool:
        return any(isinstance(mixer, MlaSpec) for mixer in self.mixers)

    @cached_property
    def has_qkv_projections(self) -> bool:
        """Queries, keys and values are projected as in most models, unlike in MLA."""
        return self.has_mixers and not self.has_mla

    @cached_property
    def has_gated_attention(self) -> bool:
        return any(isinstance(mixer, AttentionSpec) and mixer.gated for mixer in self.mixers)

    @cached_property
    def layer_kinds(self) -> set[str]:
        """full, sliding, chunk, unmasked or linear."""
        return {mixer_kind(mixer) for mixer in self.mixers}

    @cached_property
    def has_rope(self) -> bool:
        return any(True for _ in find_specs(self.layers, RopeSpec))

    @cached_property
    def moe_specs(self) -> list[MoeSpec]:
        return list(find_specs(self.layers, MoeSpec))

    @cached_property
    def has_experts(self) -> bool:
        return bool(self.moe_specs)

    @cached_property
    def has_dense_mlp(self) -> bool:
        """Some layer has an MLP that is not a shared expert."""
        return any(True for _ in find_specs(self.layers, MlpSpec, skip=MoeSpec))

    @cached_property
    def has_mlp(self) -> bool:
        """Some layer has an MLP, which may be a shared expert."""
        return any(True for _ in find_specs(self.layers, MlpSpec))

    @cached_property
    def has_residual_blocks(self) -> bool:
        """Layers are a mixer and a feed-forward on a residual, to which add-ons can attach."""
        return all(isinstance(layer, LayerSpec) for layer in self.layers)

    @cached_property
    def has_sequential_blocks(self) -> bool:
        """The feed-forward follows the mixer, instead of reading the same input."""
        return self.has_residual_blocks and not any(layer.parallel for layer in self.layers)

    def depends_on(self, key: str) -> bool:
        """Whether some value of a key, other than the one set, changes the layers."""
        return any(
            self.layers != layers_or_none(changed(self.config, **{key: value}))
            for value in other_values(self.config, key)
        )


def find_specs(
    value: object, spec_type: type[Spec], skip: type | tuple[type, ...] = ()
) -> Iterator[Spec]:
    """The specs of a type in a tree of dataclasses and lists, outside of those of type `skip`."""
    if isinstance(value, skip):
        return
    if isinstance(value, spec_type):
        yield value
    if isinstance(value, list | tuple):
        for item in value:
            yield from find_specs(item, spec_type, skip)
    elif is_dataclass(value):
        for field in fields(value):
            yield from find_specs(getattr(value, field.name), spec_type, skip)


def changed(config: MaxTextConfig, **changes: object) -> MaxTextConfig:
    """A copy with other values. Derived values are not computed again."""
    return config.model_copy(update=changes)


def layers_or_none(config: MaxTextConfig) -> list[Any] | None:
    """The layers, or None if there are none with these values: specs also check them."""
    try:
        return layers(config)
    except (ConfigError, ValueError):
        return None


def other_values(config: MaxTextConfig, key: str) -> list[object]:
    """A few values of a key other than its own."""
    value = getattr(config, key)
    default = type(config).model_fields[key].get_default(call_default_factory=True)
    values: list[object]
    match value:
        case bool():
            values = [not value]
        case int():
            values = [default, value + 1, 1, 2]
        case float():
            values = [default, value / 2 + 0.25]
        case str():
            values = [default, "sigmoid", "softmax"]
        case _:
            values = [default]
    return [item for item in values if item != value]


def decoder_blocks(config: MaxTextConfig, has: Callable[[Capabilities], object]) -> list[str]:
    """The decoder_blocks in which models of several kinds of layers with experts have a feature."""
    blocks = []
    for block in FAMILIES:
        probe = changed(
            config,
            decoder_block=type(config.decoder_block)(block),
            num_decoder_layers=PROBE_LAYERS,
            num_experts=max(config.num_experts, 2),
            sliding_window_size=config.sliding_window_size or 1,
            chunk_attn_window_size=config.chunk_attn_window_size or 1,
            nope_layer_interval=config.nope_layer_interval if config.nope_layer_interval > 0 else 4,
        )
        probe._architecture = Architecture()  # its lists belong to a checkpoint of another family
        try:
            if has(Capabilities(probe)):
                blocks.append(block)
        except (ConfigError, ValueError):
            continue
    return blocks
