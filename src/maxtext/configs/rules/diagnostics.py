"""Rules of the diagnostics keys."""

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings


@rule("profile_periodically_period")
def periodic_profiles_do_not_overlap(settings: Settings) -> str | None:
    if 0 < settings.profile_periodically_period < settings.profiler_steps:
        return (
            f"profile_periodically_period={settings.profile_periodically_period} is below "
            f"profiler_steps={settings.profiler_steps}: a profile would start before the previous "
            "one ends"
        )
    return None
