"""Attributes of a published checkpoint that no key names.

Keys describe families by rules (every fourth layer is global); a checkpoint's config.json may list
its layers, or state a number that the rule does not give. Such attributes are under
`architecture:` in a model's file or in the config.yml of a converted checkpoint. An attribute that
is None is determined by the keys.
"""

from collections.abc import Iterable

from pydantic import ValidationError

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.configs import fields
from maxtext.configs.provenance import Layer, Setting
from maxtext.configs.types.derived import Architecture

# attribute -> keys that determine it as well: setting one of them drops the attribute
DETERMINED_BY_KEYS = {
    "rope": (
        "rope_type", "rope_use_scale", "rope_min_timescale", "rope_max_timescale",
        "rope_linear_scaling_factor", "local_rope_max_timescale", "global_rope_max_timescale",
        "global_rope_proportion", "local_rope_proportion", "original_max_position_embeddings",
        "rope_factor", "beta_fast", "beta_slow", "rope_interleave", "rope_truncate",
        "rope_attention_scaling", "partial_rotary_factor",
    ),
    "softmax_scale": ("mscale",),
    "normalise_chosen": ("norm_topk_prob", "routed_score_func"),
    "shared_expert_dim": ("shared_experts", "base_moe_mlp_dim"),
}  # fmt: skip


def pop_hf_attributes(base: Layer, layers: Iterable[Layer]) -> Architecture:
    """Remove the attributes from layers, ordered from weakest to strongest, and merge them."""
    hf_attributes: Json = {}
    settings = base
    for layer in layers:
        stated = layer.pop("architecture", None)
        for attribute, keys in DETERMINED_BY_KEYS.items():
            if stated is None and any(changes(key, layer, settings) for key in keys):
                hf_attributes.pop(attribute, None)
        if stated is not None:
            hf_attributes |= validate(stated).model_dump(exclude_unset=True)
        settings = settings | layer
    return Architecture.model_validate(hf_attributes)


def changes(key: str, layer: Layer, before: Layer) -> bool:
    return key in layer and not fields.is_same(key, layer[key].value, before[key].value)


def validate(setting: Setting) -> Architecture:
    try:
        return Architecture.model_validate(setting.value)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()
        )
        raise ConfigError(f"architecture ({setting.source}) does not fit: {problems}") from error
