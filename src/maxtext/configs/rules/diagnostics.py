"""Rules of the diagnostics keys."""

from maxtext.configs.rules.rule import in_range, inert_unless, rule
from maxtext.configs.types import Settings

in_range(
    1, None, "profiler_steps", "stack_trace_interval_seconds", "goodput_upload_interval_seconds"
)
in_range(1, None, "step_deviation_interval_seconds", "heartbeat_reporting_interval_in_seconds")
in_range(0, None, "skip_first_n_steps_for_profiler", "record_internal_nn_metrics")
in_range(1, None, "profile_periodically_period", special=(-1,))
in_range(0, None, "dump_step", special=(-1,))
inert_unless(lambda s: s.enable_wandb, "enable_wandb=true", "wandb_project_name", "wandb_run_name")
in_range(0, 65535, "prometheus_port", "jax_profiler_port")


@rule("profile_periodically_period")
def periodic_profiles_do_not_overlap(settings: Settings) -> str | None:
    if 0 < settings.profile_periodically_period < settings.profiler_steps:
        return (
            f"profile_periodically_period={settings.profile_periodically_period} is below "
            f"profiler_steps={settings.profiler_steps}: a profile would start before the previous "
            "one ends"
        )
    return None
