"""Rules of the reinforcement learning keys."""

from maxtext.configs.rules.rule import in_range, rule
from maxtext.configs.types import Settings

in_range(
    0,
    1,
    "trainer_devices_fraction",
    "sampler_devices_fraction",
    "hbm_utilization_vllm",
    "train_fraction",
)
in_range(
    1, None, "num_generations", "num_iterations", "batch_size", "num_batches", "max_concurrency"
)
in_range(0, None, "grpo_beta", "grpo_epsilon", "epsilon_high", "off_policy_steps")
in_range(1, None, "train_micro_batch_size", "rollout_micro_batch_size", special=(-1,))


@rule("trainer_devices_fraction")
def trainer_and_sampler_share_the_devices(settings: Settings) -> str | None:
    if settings.trainer_devices_fraction + settings.sampler_devices_fraction > 1 and not (
        settings.trainer_devices_fraction == settings.sampler_devices_fraction == 1
    ):
        return (
            "trainer_devices_fraction + sampler_devices_fraction is above 1: split the devices, "
            "or set both to 1"
        )
    return None
