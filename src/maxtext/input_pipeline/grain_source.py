"""dataset_type=grain: files → documents of this stream → tokens → sequences → rows → batches.

Training visits every document num_epoch times, each epoch in an order of its own, and drops the rows that do not fill
a last batch. Evaluation visits every document once, in order, and keeps them all. Each stream reads its own documents,
so one may run out of batches before another.
Resuming is exact; a run that ended and goes on with a larger num_epoch may repeat or leave out a few rows of its last
shuffle window.
"""

import os
from typing import Any

import grain
import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.grain_batches import GrainBatches
from maxtext.input_pipeline.interface import BatchIterator, Share, Split
from maxtext.input_pipeline.packing import to_batches, to_rows
from maxtext.input_pipeline.sequences import Encode, Long, ToSequences
from maxtext.input_pipeline.text_files import TextFiles, find_files
from maxtext.tokenizers import load_tokenizer

# Text that may be read ahead. A record is a whole file here, and grain_prefetch_buffer_size counts records: without
# this bound a few hundred large files would be in memory at once.
READ_AHEAD_BYTES = 256 * 2**20
STREAM_DOCUMENTS = 8  # at least so many for each stream, or its rows would all come from the same few


def grain_source(config: MaxTextConfig, split: Split, share: Share) -> BatchIterator | None:
    key = f"grain_{split.value}_files"
    value = config.grain_train_files if split is Split.TRAIN else config.grain_eval_files
    if split is Split.EVAL and not value.strip():
        return None
    if config.grain_file_type != "text":
        raise ConfigError(
            f"grain_file_type={config.grain_file_type}: this version reads text, set grain_file_type=text"
        )
    files = find_files(key, value)
    sizes = [os.path.getsize(file) for file in files]
    if not any(sizes):
        raise ConfigError(f"{key}: all {len(files)} files of {value} are empty")
    if len(files) < share.count:
        raise ConfigError(
            f"{key} has {len(files)} documents for {share.count} streams, and each reads its own: "
            "name the files that the run began with, or start again under a new run_name"
        )

    packing = config.grain_packing_type if config.packing else None
    length = config.max_target_length
    seed = config.data_shuffle_seed % 2**32 if config.enable_data_shuffling and split is Split.TRAIN else None
    documents = read_documents(config, split, share, files, sizes, seed)
    sequences = grain.experimental.FlatMapIterDataset(documents, ToSequences(length, long_documents(config)))
    rows = to_rows(sequences, packing, length, config.max_segments_per_seq, seed)
    window = config.grain_shuffle_buffer_size if seed is not None else 1
    if window > 1:  # the rows of a long document follow each other; mixed, they do not make a batch of their own
        rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=window, seed=seed)
    batches = to_batches(rows, share.rows, keep_last=split is Split.EVAL)
    iterator = GrainBatches(
        batches,
        made_by={
            "dataset_type": "grain",
            "stream": share.index,
            "streams": share.count,
            "documents": len(files),
            "data_shuffle_seed": seed,
            "grain_shuffle_buffer_size": window,
            "grain_packing_type": packing,
            "max_target_length": length,
            "use_truncation": config.use_truncation,
        },
    )
    if iterator.empty:
        iterator.close()
        raise too_little(config, split, share, documents)
    return iterator


def most_streams(config: MaxTextConfig, split: Split) -> int:
    value = config.grain_train_files if split is Split.TRAIN else config.grain_eval_files
    return max(1, len(find_files(f"grain_{split.value}_files", value)) // STREAM_DOCUMENTS)


def read_documents(
    config: MaxTextConfig, split: Split, share: Share, files: list[str], sizes: list[int], seed: int | None
) -> grain.IterDataset:
    """Token ids of this stream's documents, epoch after epoch."""
    dataset = grain.MapDataset.source(TextFiles(files))
    if seed is not None:
        dataset = dataset.shuffle(seed)
    # Shared out after the shuffle and before the repeat: in each epoch the streams together have every document once.
    dataset = dataset[share.index :: share.count].repeat(config.num_epoch if split is Split.TRAIN else 1)
    dataset = dataset.map(Encode(load_tokenizer(config), config.add_bos, config.add_eos))
    return dataset.to_iter_dataset(read_options(config, split, sizes, share.beside))


def read_options(config: MaxTextConfig, split: Split, sizes: list[int], beside: int) -> grain.ReadOptions:
    if split is Split.TRAIN:
        threads, ahead = config.grain_num_threads, config.grain_prefetch_buffer_size
    else:
        threads, ahead = config.grain_num_threads_eval, config.grain_prefetch_buffer_size_eval
    threads, ahead = -(-threads // beside), -(-ahead // beside)
    largest = np.cumsum(sorted(sizes, reverse=True)[:ahead])
    fits = max(int(np.searchsorted(largest, READ_AHEAD_BYTES // beside, side="right")), 1)
    if fits < len(largest):
        LOGGER.info("reading %d large files ahead instead of %d, to spare memory", fits, ahead)
        ahead = fits
    return grain.ReadOptions(num_threads=min(threads, ahead), prefetch_buffer_size=ahead)


def long_documents(config: MaxTextConfig) -> Long:
    if config.use_truncation:
        return Long.CUT
    return Long.WHOLE if config.packing and config.grain_packing_type == "concat_then_split" else Long.SPLIT


def too_little(config: MaxTextConfig, split: Split, share: Share, documents: Any) -> ConfigError:
    """The error for data that makes no batch, with the numbers that show why."""
    pairs = [max(len(tokens) - 1, 0) for tokens in documents]
    length = config.max_target_length
    used = sum(min(count, length) for count in pairs) if config.use_truncation else sum(pairs)
    cut = sum(pairs) - used
    where = f" for stream {share.index} of {share.count}" if share.count > 1 else ""
    if split is Split.EVAL:
        return ConfigError(f"grain_eval_files has no document of two tokens or more{where}, so nothing to predict")
    rescue = f"set use_truncation=false, which now leaves out {cut} tokens, " if cut else ""
    unpacked = "" if config.packing else f" in {sum(count > 0 for count in pairs)} documents, one a row"
    return ConfigError(
        f"grain_train_files has {used} tokens{unpacked} in num_epoch={config.num_epoch}{where}, but one batch needs "
        f"{share.rows * length} ({share.rows} sequences of max_target_length={length}): {rescue}add text, "
        "raise num_epoch, or lower per_device_batch_size or max_target_length"
    )
