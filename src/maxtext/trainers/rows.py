"""How many rows each step trains on. Batch-size ramp-up grows by equal increments, each size until
its share of the samples is used."""

from maxtext.configs.derive import rampup_stages
from maxtext.configs.types import MaxTextConfig


def rows_at(config: MaxTextConfig, step: int) -> int:
    """Rows that step number `step` trains on."""
    past = 0
    for rows, steps in rampup_stages(config) if config.enable_rampup_batch_size else ():
        past += steps
        if step < past:
            return rows
    return config.global_batch_size_to_train_on


def row_counts(config: MaxTextConfig) -> list[int]:
    """All sizes that rows_at gives, the full one last."""
    full = config.global_batch_size_to_train_on
    if not config.enable_rampup_batch_size:
        return [full]
    return [*(rows for rows, steps in rampup_stages(config) if steps), full]
