"""What a published checkpoint fixes and no key names.

The keys describe families by rules (every fourth layer is global); a checkpoint's own config.json
may say it layer by layer, or give a number that a family's rule does not. Such facts stand under
`architecture:` in a model's file or in the config.yml of a converted checkpoint. A fact that is
None leaves the matter to the keys.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from maxtext.common.errors import ConfigError
from maxtext.configs import fields
from maxtext.configs.provenance import Layer, Setting
from maxtext.configs.types.architecture import Architecture

# Keys that say a fact in another way: who chooses one of them has it, and the fact is dropped.
SAID_BY_KEYS = {
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


def take(base: Layer, layers: Iterable[Layer]) -> Architecture:
    """The facts of layers given from the weakest to the strongest; they are taken out of the
    layers.
    """
    facts: dict[str, Any] = {}
    seen = base
    for layer in layers:
        own = layer.pop("architecture", None)
        for fact, keys in SAID_BY_KEYS.items():
            if own is None and any(changes(key, layer, seen) for key in keys):
                facts.pop(fact, None)
        if own is not None:
            facts |= checked(own).model_dump(exclude_unset=True)
        seen = seen | layer
    return Architecture.model_validate(facts)


def changes(key: str, layer: Layer, before: Layer) -> bool:
    return key in layer and not fields.is_same(key, layer[key].value, before[key].value)


def checked(setting: Setting) -> Architecture:
    try:
        return Architecture.model_validate(setting.value)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()
        )
        raise ConfigError(f"architecture ({setting.source}) does not fit: {wrong}") from error
