"""How many rows a step of a training method trains on, and by which keys (`StepBatches`).

Ramp-up (`batch_size_at`) raises the global batch size by equal increments, and keeps each size
until its share of the samples is used.
"""

from typing import Protocol

from maxtext.common.types import Json
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


class StepBatches(Protocol):
    """The batches of a training method. Rows are those of a microbatch over all devices."""

    rows_key: str  # the keys that a batch which does not divide over the mesh comes from
    microbatch_key: str  # the key that sets the rows of a microbatch

    def rows_to_read(self, config: MaxTextConfig, step: int) -> int:
        """Rows of the data that step number `step` needs."""

    def sizes_to_read(self, config: MaxTextConfig) -> list[int]:
        """All values of `rows_to_read`, the full size last."""

    def microbatch_value(self, config: MaxTextConfig, rows: int, num_devices: int) -> float:
        """The value of `microbatch_key` for a microbatch of `rows` rows."""

    def possible_rows(self, config: MaxTextConfig, limit: int, shards: int) -> int:
        """The largest microbatch of up to `limit` rows that `microbatch_key` can set, if the mesh
        splits rows into `shards`; 0 if there is none."""

    def with_microbatch(self, config: MaxTextConfig, rows: int, num_devices: int) -> Json:
        """The keys of a microbatch of `rows` rows."""


class RowBatches:
    """Batches of per_device_batch_size rows of the data on each device."""

    rows_key = microbatch_key = "per_device_batch_size"

    def rows_to_read(self, config: MaxTextConfig, step: int) -> int:
        return batch_size_at(config, step)

    def sizes_to_read(self, config: MaxTextConfig) -> list[int]:
        return batch_sizes(config)

    def microbatch_value(self, config: MaxTextConfig, rows: int, num_devices: int) -> float:
        return rows / num_devices

    def possible_rows(self, config: MaxTextConfig, limit: int, shards: int) -> int:
        return limit // shards * shards

    def with_microbatch(self, config: MaxTextConfig, rows: int, num_devices: int) -> Json:
        return {self.microbatch_key: self.microbatch_value(config, rows, num_devices)}
