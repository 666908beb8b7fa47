"""Rules of the position embedding keys that need the layers."""

from maxtext.configs.types.needs import rope_is_scaled
from maxtext.models.capabilities import Capabilities
from maxtext.models.rule import inert_unless, inert_unless_layers_depend, layer_rule


def uses_yarn(model: Capabilities) -> bool:
    return model.has_rope and model.config.rope_type.value == "yarn"


inert_unless(
    lambda model: model.has_rope,
    "RoPE (no trainable_position_size or use_untrainable_positional_embedding)",
    "rope_type",
    "rope_min_timescale",
    "rope_max_timescale",
)
inert_unless_layers_depend("RoPE, in {blocks}", "nope_layer_interval")
inert_unless(
    uses_yarn, "rope_type=yarn", "beta_fast", "beta_slow", "rope_truncate", "rope_interleave"
)
inert_unless_layers_depend(
    "a decoder_block other than {block}, which always interleaves",
    "rope_interleave",
    given=uses_yarn,
)
inert_unless(
    lambda model: uses_yarn(model) and model.config.rope_factor > 1,
    "rope_type=yarn and a rope_factor above 1",
    "rope_attention_scaling",
)
inert_unless(
    lambda model: uses_yarn(model) and model.config.rope_factor > 1 and model.has_mla,
    "rope_type=yarn, a rope_factor above 1 and attention_type=mla",
    "mscale",
)
inert_unless(
    lambda model: model.has_rope and model.config.rope_type.value == "llama3.1",
    "rope_type=llama3.1",
    "rope_use_scale",
)
inert_unless(
    lambda model: model.has_rope and not rope_is_scaled(model.config),
    "rope_type=default",
    "rope_linear_scaling_factor",
)
inert_unless_layers_depend(
    "{blocks}",
    "local_rope_max_timescale",
    "global_rope_max_timescale",
    "global_rope_proportion",
    "local_rope_proportion",
)
inert_unless(lambda model: model.has_rope, "RoPE", "partial_rotary_factor")
inert_unless_layers_depend(
    "a decoder_block other than {block}, whose layers fix it",
    "partial_rotary_factor",
    given=lambda model: model.has_rope,
)


@layer_rule("head_dim")
def rope_dimensions_are_even(model: Capabilities) -> str | None:
    config = model.config
    key = "qk_rope_head_dim" if model.has_mla else "head_dim"
    for mixer in model.mixers:
        if getattr(mixer, "rope", None) is None:
            continue
        head_dim = mixer.rope_dim if model.has_mla else mixer.head_dim
        rotary_dim = mixer.rope.rotated(head_dim)
        if rotary_dim % 2 == 0:
            continue
        if head_dim == config.global_head_dim != config.head_dim:
            return (
                f"global_head_dim={config.global_head_dim} is odd, and RoPE rotates pairs: choose "
                "an even number"
            )
        return (
            f"{key}={head_dim} x partial_rotary_factor={config.partial_rotary_factor:g} makes "
            f"{rotary_dim} rotary dimensions, and RoPE rotates pairs: choose values that make an "
            "even number"
        )
    return None


@layer_rule("attention_type")
def mla_needs_rope(model: Capabilities) -> str | None:
    config = model.config
    if config.attention_type != "mla":
        return None
    if config.trainable_position_size > 0:
        key = "trainable_position_size"
    elif config.use_untrainable_positional_embedding:
        key = "use_untrainable_positional_embedding"
    else:
        return None
    return f"{key} does not go with attention_type=mla, which requires RoPE: leave it out"
