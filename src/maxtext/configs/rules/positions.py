"""Rules of the position embedding keys."""

from maxtext.configs.rules.rule import in_range, inert_unless, rule
from maxtext.configs.types import Settings

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


inert_unless(
    lambda s: (
        rope_is_scaled(s)
        or (s.rope_type.value == "llama3.1" and s.source("rope_use_scale").is_user)
    ),
    "rope_type=yarn, or llama3.1 with rope_use_scale=true",
    "rope_factor",
    "original_max_position_embeddings",
)


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
