"""Attributes of a published checkpoint that no key names."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

LayerKind = Literal["full", "sliding", "chunk", "linear"]


class Architecture(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    layer_kinds: tuple[LayerKind, ...] | None = None  # the attention mask of each layer
    moe_layers: tuple[bool, ...] | None = None  # which layers have experts
    rope_layers: tuple[bool, ...] | None = None  # which layers have rotary positions
    rope: dict[LayerKind | Literal["all"], dict[str, Any]] | None = (
        None  # the fields of a RopeSpec, by kind of layer
    )
    softmax_scale: float | None = None
    logit_scale: float = 1.0  # by which logits are multiplied
    normalise_chosen: bool | None = (
        None  # whether the weights of a token's experts are made to sum to one
    )
    shared_expert_dim: int | None = None  # where it is not shared_experts x moe_mlp_dim
    temperature_scale: float = 0.1  # of temperature_tuning
    temperature_length: int = 8192
