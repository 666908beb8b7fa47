"""Rules of the position embedding keys."""

from maxtext.configs.rules.rule import in_range, inert_unless, rule
from maxtext.configs.types import Settings
from maxtext.configs.types.blocks import SKIPS_POSITIONS, block, latent, rotates

in_range(1, None, "rope_min_timescale", "rope_max_timescale")
in_range(0, None, "beta_fast", "beta_slow")
in_range(1, None, "local_rope_max_timescale", "global_rope_max_timescale", special=(-1,))
in_range(1, None, "trainable_position_size", "nope_layer_interval", special=(-1,))
in_range(1, None, "max_position_embeddings", "original_max_position_embeddings", "rope_factor")
in_range(0, None, "rope_linear_scaling_factor", "mscale")
in_range(0, 1, "global_rope_proportion", "local_rope_proportion")


def rope_is_scaled(settings: Settings) -> bool:
    return settings.rope_type.value == "yarn" or (
        settings.rope_type.value == "llama3.1" and settings.rope_use_scale
    )


def uses_yarn(settings: Settings) -> bool:
    return rotates(settings) and settings.rope_type.value == "yarn"


inert_unless(
    rotates,
    "RoPE (no trainable_position_size or use_untrainable_positional_embedding)",
    "rope_type",
    "rope_min_timescale",
    "rope_max_timescale",
)
inert_unless(
    lambda s: rotates(s) and block(s) in SKIPS_POSITIONS,
    f"RoPE, in one of the decoder_blocks {', '.join(SKIPS_POSITIONS)}",
    "nope_layer_interval",
)
inert_unless(
    lambda s: (
        rope_is_scaled(s)
        or (s.rope_type.value == "llama3.1" and s.source("rope_use_scale").is_user)
    ),
    "rope_type=yarn, or llama3.1 with rope_use_scale=true",
    "rope_factor",
    "original_max_position_embeddings",
)
inert_unless(uses_yarn, "rope_type=yarn", "beta_fast", "beta_slow", "rope_truncate")
inert_unless(
    lambda s: uses_yarn(s) and block(s) != "llama4",
    "rope_type=yarn and a decoder_block other than llama4, which always interleaves",
    "rope_interleave",
)
inert_unless(
    lambda s: uses_yarn(s) and s.rope_factor > 1,
    "rope_type=yarn and a rope_factor above 1",
    "rope_attention_scaling",
)
inert_unless(
    lambda s: uses_yarn(s) and s.rope_factor > 1 and latent(s),
    "rope_type=yarn, a rope_factor above 1 and attention_type=mla",
    "mscale",
)
inert_unless(
    lambda s: rotates(s) and s.rope_type.value == "llama3.1", "rope_type=llama3.1", "rope_use_scale"
)
inert_unless(
    lambda s: rotates(s) and not rope_is_scaled(s),
    "rope_type=default",
    "rope_linear_scaling_factor",
)
inert_unless(
    lambda s: rotates(s) and block(s) in ("gemma3", "gemma4"),
    "decoder_block=gemma3 or gemma4",
    "local_rope_max_timescale",
)
inert_unless(
    lambda s: rotates(s) and block(s) == "gemma4",
    "decoder_block=gemma4",
    "global_rope_max_timescale",
    "global_rope_proportion",
    "local_rope_proportion",
)


@rule("head_dim")
def rope_dimensions_are_even(settings: Settings) -> str | None:
    if not rotates(settings):
        return None
    key = "qk_rope_head_dim" if latent(settings) else "head_dim"
    # gemma4 has its own proportions
    factor = 1 if block(settings) == "gemma4" else settings.partial_rotary_factor
    rotated = int(getattr(settings, key) * factor)
    if rotated % 2:
        return (
            f"{key}={getattr(settings, key)} x "
            f"partial_rotary_factor={settings.partial_rotary_factor:g} makes {rotated} rotary "
            "dimensions, and RoPE rotates pairs: choose values that make an even number"
        )
    if settings.global_head_dim % 2:
        return (
            f"global_head_dim={settings.global_head_dim} is odd, and RoPE rotates pairs: choose an "
            "even number"
        )
    return None


@rule("attention_type")
def mla_needs_rope(settings: Settings) -> str | None:
    if latent(settings) and not rotates(settings):
        key = (
            "trainable_position_size"
            if settings.trainable_position_size > 0
            else "use_untrainable_positional_embedding"
        )
        return f"{key} does not go with attention_type=mla, which requires RoPE: leave it out"
    return None


@rule("trainable_position_size")
def learned_positions_cover_the_sequence(settings: Settings) -> str | None:
    if 0 < settings.trainable_position_size < settings.max_target_length:
        return (
            f"trainable_position_size={settings.trainable_position_size} is below "
            f"max_target_length={settings.max_target_length}: the last tokens would have no "
            "position embedding"
        )
    return None


@rule("rope_min_timescale")
def rope_timescales_are_ordered(settings: Settings) -> str | None:
    if settings.rope_min_timescale >= settings.rope_max_timescale:
        return (
            f"rope_min_timescale={settings.rope_min_timescale} must be below "
            f"rope_max_timescale={settings.rope_max_timescale}"
        )
    return None
