"""Rules of the position embedding keys."""

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings


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
