"""dataset_type=olmo_grain: shards of token ids, cut by an index into instances of max_target_length
tokens.

Batches are as MaxText and OLMo publish them for this data. A row is one instance and one segment,
with positions from 0, even where documents end inside it. Its L tokens make L - 1 pairs: the target
of the last token is in another instance, so it has none. A repetitive instance keeps its inputs,
and its targets are masked (olmo_apply_ngram_filter).

Training reads every instance num_epoch times, in a new order in each epoch, and drops the
rows that do not fill a last batch unless generate_padding_batch_train is set. An index
names training data only, so there is no evaluation data.
"""

import grain
import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import Batch, BatchIterator, ShardSpec, Split, keeps_last
from maxtext.input_pipeline.olmo_index import Index, read_index, remap_paths, token_offsets
from maxtext.input_pipeline.order import epoch_order
from maxtext.input_pipeline.packing import to_batches
from maxtext.input_pipeline.pipeline import STREAM_DOCUMENTS, GrainBatches, shuffle_seed
from maxtext.input_pipeline.row_formats import RowFormat


def olmo_source(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator | None:
    if split is Split.EVAL:
        return None
    length = config.max_target_length
    index = open_index(config)
    if index.sequence_length != length:
        raise ConfigError(
            f"olmo_index_path={config.olmo_index_path} cuts instances of {index.sequence_length} "
            f"tokens, but max_target_length={length}: set it to {index.sequence_length}, or make "
            f"an index for {length}"
        )
    here = remap_paths(index, config.olmo_path_remap_from, config.olmo_path_remap_to)
    read = ReadInstance(here, token_offsets(here), config.vocab_size)
    seed, keep_last = shuffle_seed(config, split), keeps_last(config, split)
    order = epoch_order(index.instances, None, shard, seed)
    if len(order) * config.num_epoch < (shard.min_rows or (1 if keep_last else shard.rows)):
        raise too_little_data(config, index, shard)
    rows = (
        order.repeat(config.num_epoch).map(read).map(ToRow(length, config.olmo_apply_ngram_filter))
    )
    return GrainBatches(
        to_batches(rows.to_iter_dataset(read_options(config, shard)), shard, keep_last),
        settings={
            "dataset_type": config.dataset_type.value,
            "stream": shard.index,
            "streams": shard.count,
            "index": index.fingerprint,
            "data_shuffle_seed": seed,
        },
    )


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    return max(1, open_index(config).instances // STREAM_DOCUMENTS)


def open_index(config: MaxTextConfig) -> Index:
    if not config.olmo_index_path:
        raise ConfigError(
            "dataset_type=olmo_grain needs olmo_index_path: name the index of the token files"
        )
    return read_index(config.olmo_index_path)


def read_options(config: MaxTextConfig, shard: ShardSpec) -> grain.ReadOptions:
    """Threads and rows read ahead, within this stream's part of grain_ram_budget_mb."""
    # Inputs and targets: rows share the arrays of the other fields.
    row_bytes = 2 * config.max_target_length * np.dtype(np.int32).itemsize
    fits = max(config.grain_ram_budget_mb * 2**20 // row_bytes, 1)
    threads, num_prefetched = config.grain_num_threads, min(config.grain_prefetch_buffer_size, fits)
    threads, num_prefetched = (
        -(-threads // shard.local_streams),
        -(-num_prefetched // shard.local_streams),
    )
    return grain.ReadOptions(
        num_threads=min(threads, num_prefetched), prefetch_buffer_size=num_prefetched
    )


def too_little_data(config: MaxTextConfig, index: Index, shard: ShardSpec) -> ConfigError:
    where = f" for each of {shard.count} streams" if shard.count > 1 else ""
    return ConfigError(
        f"olmo_index_path={config.olmo_index_path} has {index.instances} instances, and "
        f"num_epoch={config.num_epoch}, but one batch needs {shard.min_rows or shard.rows}{where}: "
        "add shards, raise num_epoch, or lower per_device_batch_size"
    )


class ReadInstance:
    """Maps the number of an instance to its tokens [sequence_length].

    A file is opened for each read: a corpus may have more shards than a process may open, and a
    memory-mapped file that is truncated during the run would kill the process without a message.
    """

    def __init__(self, index: Index, offsets: tuple[int, ...], vocab_size: int):
        self.index = index
        self.offsets = offsets
        self.vocab_size = vocab_size
        self.dtype = np.dtype(index.dtype)

    def __call__(self, instance: int) -> np.ndarray:
        shard, first = self.index.locate(instance)
        path, length = self.index.shards[shard].path, self.index.sequence_length
        offset = self.offsets[shard] + first * self.dtype.itemsize
        try:
            tokens = np.fromfile(path, self.dtype, length, offset=offset)
        except OSError as error:
            raise UserError(f"the shard {path} can no longer be read: {error.strerror}") from None
        if len(tokens) < length:
            raise UserError(
                f"the shard {path} has become shorter since the run began: restore it and resume"
            )
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            token_index = int(np.flatnonzero((tokens >= self.vocab_size) | (tokens < 0))[0])
            raise UserError(
                f"the shard {path} has token {tokens[token_index]} at position "
                f"{first + token_index}, outside vocab_size={self.vocab_size}: set vocab_size to "
                "that of the tokenizer that made the shards, and check the dtype of the index, "
                f"{self.index.dtype}"
            )
        return tokens


class ToRow:
    """Maps the tokens of an instance to a row with all fields. Rows share the constant arrays."""

    def __init__(self, length: int, drop_repetitive: bool):
        self.drop_repetitive = drop_repetitive
        self.positions = np.arange(length, dtype=np.int32)
        self.target_positions = np.append(self.positions[:-1], np.int32(0))
        self.segment = np.ones(length, np.int32)
        self.target_segment = np.append(self.segment[:-1], np.int32(0))
        self.no_targets = np.zeros(length, np.int32)

    def __call__(self, tokens: np.ndarray) -> Batch:
        inputs = tokens.astype(np.int32)
        masked = self.drop_repetitive and is_repetitive(tokens)
        return {
            "inputs": inputs,
            "inputs_position": self.positions,
            "inputs_segmentation": self.segment,
            "targets": np.append(inputs[1:], np.int32(0)),
            "targets_position": self.target_positions,
            "targets_segmentation": self.no_targets if masked else self.target_segment,
        }


PERIODS = range(1, 14)
TOO_MANY_TIMES = 32


def is_repetitive(tokens: np.ndarray) -> bool:
    """`tokens` [n] of any integer type."""
    return any(repeats(tokens, period) for period in PERIODS)


def repeats(tokens: np.ndarray, period: int) -> bool:
    """Whether some n-gram of `period` tokens occurs TOO_MANY_TIMES in succession."""
    equal = tokens[period:] == tokens[:-period]
    # A run of true values is a substring of their bytes, and bytes have the fastest search.
    return b"\1" * ((TOO_MANY_TIMES - 1) * period) in equal.tobytes()
