"""The global batch size of each step. Ramp-up raises it by equal increments, and keeps each size
until its share of the samples is used."""

from maxtext.configs.derive import rampup_stages
from maxtext.configs.types import MaxTextConfig


def batch_size_at(config: MaxTextConfig, step: int) -> int:
    """Rows that step number `step` trains on."""
    stage_end = 0
    for rows, steps in rampup_stages(config) if config.enable_rampup_batch_size else ():
        stage_end += steps
        if step < stage_end:
            return rows
    return config.global_batch_size_to_train_on


def batch_sizes(config: MaxTextConfig) -> list[int]:
    """All values of batch_size_at, the full size last."""
    full = config.global_batch_size_to_train_on
    if not config.enable_rampup_batch_size:
        return [full]
    return [*(rows for rows, steps in rampup_stages(config) if steps), full]
