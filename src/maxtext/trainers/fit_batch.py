"""Fits the batch of a fine-tuning run to its data, where the user chose no size.

The default batch is made for large data: twelve rows of 2048 tokens. A few hundred short rows would
not fill it, or would be padding for the most part. So an epoch of the data is read first:

- Rows that are not packed, such as preference pairs, get the length of the longest one.
- Packed data that fills no batch gets shorter rows, but none shorter than the longest segment.
- Data of fewer rows than a batch gets batches that it fills at least MIN_BATCHES times; data that
  fills none is padded.

Lengths are powers of two, so that little depends on the exact data.
"""

from dataclasses import dataclass

import jax
import numpy as np

from maxtext.common import progress
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.configs import derive
from maxtext.configs.provenance import Source
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import Batch
from maxtext.trainers.data_loader import open_train_streams
from maxtext.trainers.run_context import RunContext

MIN_BATCHES = 8
MIN_LENGTH = 32
MAX_ROWS_READ = 10_000  # data with more rows keeps the default length


@dataclass
class EpochSize:
    rows: int = 0
    tokens: int = 0
    longest: int = 0  # tokens of the longest segment

    def add(self, batch: Batch) -> None:
        """Count the rows of a batch that are no padding."""
        segments = np.concatenate(
            [field for name, field in batch.items() if name.endswith("inputs_segmentation")]
        )
        self.rows += int(segments[: len(next(iter(batch.values())))].any(axis=1).sum())
        self.tokens += int((segments > 0).sum())
        longest = max((np.bincount(row[row > 0]).max() for row in segments if row.any()), default=0)
        self.longest = max(self.longest, int(longest))


def fit_batch(context: RunContext) -> MaxTextConfig | None:
    """The configuration with a batch that fits the data; None if it stays as it is."""
    config, batches = context.config, context.batches
    own_rows, own_length = (
        config.source(key).kind != "default"
        for key in (batches.microbatch_key, "max_target_length")
    )
    is_supported = (
        context.row_format.has_masks
        and batches.rows_key == "per_device_batch_size"
        and config.dataset_type.value != "synthetic"
        and not (config.reuse_example_batch or config.compiled_trainstep_file)
        and jax.process_count() == 1
    )
    if not is_supported or (own_rows and own_length):
        return None
    size = read_epoch(context)
    if size is None or not size.rows:
        return None
    changed = fitting_keys(context, size, own_rows, own_length)
    if not changed:
        return None
    LOGGER.info(
        "%s, since an epoch has %d tokens in rows of up to %d; set the keys to choose others",
        " and ".join(f"{key}={value:g}" for key, value in changed.items()),
        size.tokens,
        size.longest,
    )
    changed["generate_padding_batch_train"] = True
    smaller = config.model_copy(update=changed)
    devices = derive.Devices(jax.device_count())
    smaller = smaller.model_copy(update=derive.derive(smaller, devices))
    derived = Source("derived", "the size of the data")
    smaller._sources = config._sources | dict.fromkeys(changed, derived)
    return smaller


def read_epoch(context: RunContext) -> EpochSize | None:
    """The size of the first epoch; None if it is large enough for the default batch."""
    config = context.config
    one_epoch = {"num_epoch": 1, "generate_padding_batch_train": True}
    size, limit = EpochSize(), MAX_ROWS_READ
    if config.packing:
        limit = config.global_batch_size_to_train_on
    with progress.working("reading the data"):
        streams = open_train_streams(context.with_config(config.model_copy(update=one_epoch)))
        try:
            while size.rows < limit and (batch := next(streams, None)) is not None:
                size.add(batch)
        finally:
            streams.close()
    return size if size.rows < limit else None


def fitting_keys(context: RunContext, size: EpochSize, own_rows: bool, own_length: bool) -> Json:
    """The keys that differ from the default batch."""
    config, devices = context.config, jax.device_count()
    length, rows = config.max_target_length, size.rows
    if not own_length:
        fitting = max(size.longest, MIN_LENGTH)
        if config.packing:
            least_rows = config.global_batch_size_to_train_on if own_rows else devices
            fitting = max(fitting, size.tokens // (MIN_BATCHES * least_rows))
        length = min(length, 1 << (fitting - 1).bit_length())
    if config.packing:
        rows = max(size.tokens // length, 1)
    changed: Json = {} if length == config.max_target_length else {"max_target_length": length}
    if not own_rows and rows < config.global_batch_size_to_train_on:
        rows = max(rows // (MIN_BATCHES * devices), 1) * devices
        changed |= context.batches.with_microbatch(config, rows, devices)
    return changed
