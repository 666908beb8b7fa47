"""Documents of any source → this stream's share in its order → tokens → sequences → rows → batches.

Training visits every document num_epoch times, each epoch in an order of its own, and drops the
rows that do not fill a last batch unless generate_padding_batch_train asks to keep them. Evaluation
visits every document once, in order, and keeps them all. Each stream reads its own documents, so
one may run out of batches before another. Resuming is exact; a run that ended and goes on with a
larger num_epoch may repeat or leave out a few rows of its last shuffle window.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.encode import shared_encoder
from maxtext.input_pipeline.formats import RecordSource
from maxtext.input_pipeline.grain_batches import GrainBatches
from maxtext.input_pipeline.interface import ShardSpec, Split, keeps_last
from maxtext.input_pipeline.load_documents import (
    MAX_CHUNK_DOCUMENTS,
    BadRecords,
    EncodeRecords,
    LoadDocuments,
    documents_per_chunk,
)
from maxtext.input_pipeline.mixture import documents_read, mix
from maxtext.input_pipeline.order import epoch_order, streams_within
from maxtext.input_pipeline.packing import to_batches, to_rows
from maxtext.input_pipeline.sequences import LongDocuments, ToSequences
from maxtext.input_pipeline.window_shuffle import WindowShuffle

# Documents for each data stream, at least: streams of few documents have very different numbers of
# rows.
STREAM_DOCUMENTS = 512
STREAM_CHUNKS = 4  # packets that each of several streams reads ahead, at least


@dataclass(frozen=True)
class MixtureComponent:
    """Documents, and their share of a mixture."""

    documents: RecordSource
    weight: float = 1.0


def max_streams_of(parts: Sequence[MixtureComponent]) -> int:
    """How many data streams the documents are worth. Each stream keeps decoded blocks in memory:
    all of them together keep no more than one may."""
    if not parts:
        return 1
    by_documents = min(len(part.documents) for part in parts) // STREAM_DOCUMENTS
    by_memory = min(streams_within(part.documents.blocks, part.documents.decoded) for part in parts)
    return max(1, min(by_documents, by_memory))


def document_batches(
    config: MaxTextConfig,
    split: Split,
    shard: ShardSpec,
    parts: Sequence[MixtureComponent],
    named_by: str,
) -> GrainBatches:
    """`named_by`: the key that the user would change for other data."""
    encoder, bad = shared_encoder(config, split), BadRecords(config.max_bad_records)
    epochs = config.num_epoch if split is Split.TRAIN else 1
    seed = shuffle_seed(config, split)
    few = [part for part in parts if len(part.documents) < shard.count]
    if few:
        raise ConfigError(
            f"{named_by} has {len(few[0].documents)} documents for {shard.count} streams, and each reads its own: "
            "lower data_streams, or if the run began with other files, name those or start under a new run_name"
        )
    orders = [
        epoch_order(len(part.documents), part.documents.blocks, shard, seed, part.documents.decoded)
        for part in parts
    ]
    size = min(documents_per_chunk(part.documents) for part in parts)
    options = read_options(config, split, parts, size, shard.local_streams)
    if len(parts) == 1:
        # Packets end with the epoch, so that a position in them means the same whatever num_epoch
        # is.
        chunks = orders[0].batch(size, batch_fn=list).repeat(epochs)
        loaded = chunks.map(LoadDocuments(parts[0].documents, encoder, bad))
    else:
        mixed = mix(
            orders, [part.weight for part in parts], epochs, config.mixture_stopping_strategy
        )
        if shard.index == 0:
            report_mixture(config, parts, named_by)
        loaded = mixed.batch(size, batch_fn=list).map(
            LoadMixture([LoadDocuments(part.documents, encoder, bad) for part in parts])
        )
    made_by: dict[str, Any] = {
        "stream": shard.index,
        "streams": shard.count,
        "documents": sum(len(part.documents) for part in parts),
        "packet": size,
        **encoder.adds(),
    }
    if len(parts) > 1:
        made_by["mixture"] = [[len(part.documents), part.weight] for part in parts]
    return to_token_batches(
        config, split, shard, loaded.to_iter_dataset(options), made_by, named_by
    )


def record_batches(
    config: MaxTextConfig,
    split: Split,
    shard: ShardSpec,
    records: grain.IterDataset,
    named_by: str,
    made_by: dict[str, Any],
) -> GrainBatches:
    """Batches of records that can only be read one after the other: (number, record) of this
    stream, all epochs.
    """
    encoder = shared_encoder(config, split)
    encode = EncodeRecords(named_by, encoder, BadRecords(config.max_bad_records))
    chunks = records.batch(MAX_CHUNK_DOCUMENTS, batch_fn=list).map(encode)
    made_by = {"stream": shard.index, "streams": shard.count, **made_by, **encoder.adds()}
    return to_token_batches(config, split, shard, chunks, made_by, named_by)


def to_token_batches(
    config: MaxTextConfig,
    split: Split,
    shard: ShardSpec,
    chunks: grain.IterDataset,
    made_by: dict[str, Any],
    named_by: str,
) -> GrainBatches:
    """From packets of token ids to batches."""
    packing = config.grain_packing_type if config.packing else None
    length, seed = config.max_target_length, shuffle_seed(config, split)
    sequences = grain.experimental.FlatMapIterDataset(
        chunks, ToSequences(length, long_documents(config, packing))
    )
    rows = to_rows(sequences, packing, length, config.max_segments_per_seq, seed)
    window = shard.window(config.grain_shuffle_buffer_size) if seed is not None else 1
    # The rows of a long document follow each other; mixed, they do not make a batch of their own.
    if seed is not None and window > 1:
        rows = WindowShuffle(rows, window, seed)
    made_by = {
        "dataset_type": config.dataset_type.value,
        **made_by,
        "data_shuffle_seed": seed,
        "grain_shuffle_buffer_size": window,
        "grain_packing_type": packing,
        "max_segments_per_seq": config.max_segments_per_seq if packing else None,
        "max_target_length": length,
        "use_truncation": config.use_truncation,
    }
    iterator = GrainBatches(to_batches(rows, shard, keeps_last(config, split)), made_by)
    if iterator.first_rows < max(shard.min_rows, 1):
        iterator.close()
        raise too_little(config, split, shard, chunks, named_by)
    return iterator


def shuffle_seed(config: MaxTextConfig, split: Split) -> int | None:
    return (
        config.data_shuffle_seed % 2**32
        if config.enable_data_shuffling and split is Split.TRAIN
        else None
    )


def report_mixture(config: MaxTextConfig, parts: Sequence[MixtureComponent], named_by: str) -> None:
    """Say how often each part of a training mixture is read."""
    counts = [len(part.documents) for part in parts]
    weights, strategy = [part.weight for part in parts], config.mixture_stopping_strategy
    read = documents_read(counts, weights, config.num_epoch, strategy)
    times = ", ".join(f"{number / count:.3g}" for number, count in zip(read, counts, strict=True))
    short = any(number < count for number, count in zip(read, counts, strict=True))
    advice = (
        "; all_exhausted would read all of them, and repeat the parts that end earlier"
        if short
        else ""
    )
    LOGGER.log(
        logging.WARNING if short else logging.INFO,
        "%s: the mixture has %s documents and ends after %d; with mixture_stopping_strategy=%s and num_epoch=%d its "
        "parts are read %s times%s",
        named_by, " + ".join(map(str, counts)), sum(read), strategy, config.num_epoch, times, advice,
    )  # fmt: skip


class LoadMixture:
    def __init__(self, loads: Sequence[LoadDocuments]):
        self.loads = loads

    def __call__(self, tagged: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        # In the order of the parts within a packet: rows are mixed again after packing.
        return [
            tokens
            for number, load in enumerate(self.loads)
            for tokens in load([index for part, index in tagged if part == number])
        ]


def read_options(
    config: MaxTextConfig,
    split: Split,
    parts: Sequence[MixtureComponent],
    chunk: int,
    local_streams: int,
) -> grain.ReadOptions:
    """Threads and packets read ahead, within this stream's part of grain_ram_budget_mb."""
    if split is Split.TRAIN:
        threads, ahead = config.grain_num_threads, config.grain_prefetch_buffer_size
    else:
        threads, ahead = config.grain_num_threads_eval, config.grain_prefetch_buffer_size_eval
    # A batch takes from one stream after the other, so each has some packets ready.
    threads = min(threads, max(-(-threads // local_streams), STREAM_CHUNKS))
    ahead = min(ahead, max(-(-ahead // local_streams), STREAM_CHUNKS * chunk))
    budget = config.grain_ram_budget_mb * 2**20 // local_streams
    fits = max(min(documents_within(part.documents, budget, ahead) for part in parts), 1)
    if fits < ahead:
        LOGGER.info(
            "reading %d large documents ahead instead of %d, to keep to grain_ram_budget_mb",
            fits,
            ahead,
        )
    ahead = -(-min(fits, ahead) // chunk)
    return grain.ReadOptions(num_threads=min(threads, ahead), prefetch_buffer_size=ahead)


def documents_within(documents: RecordSource, budget: int, most: int) -> int:
    """How many documents, the largest if their sizes are known, are in a budget of bytes; at most
    `most`.
    """
    sizes = documents.sizes
    if sizes is None:
        return min(int(budget * len(documents) / max(documents.nbytes, 1)), most)
    if (
        int(sizes.max(initial=0)) * most <= budget
    ):  # true of most data, and far less work for many documents
        return most
    count = min(most, len(sizes))
    largest = np.sort(np.partition(sizes, len(sizes) - count)[len(sizes) - count :])[::-1]
    within = int(np.searchsorted(np.cumsum(largest, dtype=np.int64), budget, side="right"))
    return most if within == len(largest) else within


def long_documents(config: MaxTextConfig, packing: str | None) -> LongDocuments:
    if config.use_truncation:
        return LongDocuments.CUT
    return LongDocuments.WHOLE if packing == "concat_then_split" else LongDocuments.SPLIT


def too_little(
    config: MaxTextConfig, split: Split, shard: ShardSpec, chunks: Any, named_by: str
) -> ConfigError:
    """The error for data that makes no batch, with the numbers that show why."""
    pairs = [max(len(tokens) - 1, 0) for chunk in chunks for tokens in chunk]
    length, min_rows = config.max_target_length, shard.min_rows or shard.rows
    used = sum(min(count, length) for count in pairs) if config.use_truncation else sum(pairs)
    cut = sum(pairs) - used
    where = f" for stream {shard.index} of {shard.count}" if shard.count > 1 else ""
    if split is Split.EVAL or not used:
        return ConfigError(
            f"{named_by} has no document of two tokens or more{where}, so nothing to predict"
        )
    rescue = f"set use_truncation=false, which now leaves out {cut} tokens, " if cut else ""
    unpacked = (
        "" if config.packing else f" in {sum(count > 0 for count in pairs)} documents, one a row"
    )
    return ConfigError(
        f"{named_by} has {used} tokens{unpacked} in num_epoch={config.num_epoch}{where}, but one batch needs "
        f"{min_rows * length} ({min_rows} sequences of max_target_length={length}): {rescue}add text, "
        "raise num_epoch, or lower per_device_batch_size or max_target_length"
    )
