"""Documents of any source → a shard of them in shuffled order → tokens → sequences → rows →
batches.

Training reads every document num_epoch times, in a new order in each epoch, and drops the rows that
do not fill a last batch unless generate_padding_batch_train is set. Evaluation reads every document
once, in order, and uses all rows. Each stream reads its own documents, so one may end before
another. Resuming is exact. A run that has ended and continues with a larger num_epoch may repeat or
skip a few rows of its last shuffle window.

`GrainBatches` is a Grain dataset of batches as a BatchIterator with a JSON state. It reads the
first batch at construction, so that too little data is detected before the model is built.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.encode_rows import TextEncoder, check_columns
from maxtext.input_pipeline.formats import Documents, RecordSource
from maxtext.input_pipeline.interface import (
    Batch,
    BatchIterator,
    ShardSpec,
    Split,
    State,
    TooLittleData,
    keeps_last,
    seal,
    unseal,
)
from maxtext.input_pipeline.load_documents import (
    MAX_CHUNK_DOCUMENTS,
    EncodeRecords,
    LoadDocuments,
    NothingToTrainOn,
    bad_records_of,
    documents_per_chunk,
)
from maxtext.input_pipeline.order import WindowShuffle, epoch_order, max_streams_in_memory
from maxtext.input_pipeline.packing import num_targets, packing_type, to_batches
from maxtext.input_pipeline.row_formats import DataSize, RowFormat, shared_encoder


class GrainBatches(BatchIterator):
    """`settings` are those that a position in this dataset is valid for."""

    def __init__(self, dataset: grain.IterDataset, settings: Json):
        self.dataset = dataset
        self.settings = settings
        self.iterator = iter(dataset)
        # The position after the batch last delivered. It is taken now, since at the end of the data
        # Grain's flat_map returns one that would skip sequences if a resumed run had more epochs.
        self.position: State = self.iterator.get_state()
        self.start = self.position
        self.first: Batch | None = next(self.iterator, None)
        self.first_rows = 0 if self.first is None else len(next(iter(self.first.values())))

    def __next__(self) -> Batch:
        if self.first is None:
            batch = next(self.iterator)
        else:
            batch, self.first = self.first, None
        self.position = self.iterator.get_state()
        return batch

    def get_state(self) -> State:
        return seal(self.settings, self.position)

    def set_state(self, state: State) -> None:
        self.move(with_tuples(unseal(self.settings, state)))

    def reset(self) -> None:
        self.move(self.start)

    def move(self, position: State) -> None:
        # A new iterator each time: some of Grain's iterators keep their buffers when they are
        # moved to the end.
        self.iterator.close()
        self.iterator = iter(self.dataset)
        self.iterator.set_state(position)
        self.position, self.first = position, None

    def close(self) -> None:
        self.iterator.close()


def with_tuples(value: object) -> Any:
    """Convert lists, which JSON has in place of tuples, to tuples. Grain's concat-then-split
    compares its slices with tuples, and would drop the document of a list.
    """
    if isinstance(value, dict):
        return {key: with_tuples(entry) for key, entry in value.items()}
    return (
        tuple(with_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value
    )


class Tag:
    """Maps an index to (number of its component, index)."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self, index: int) -> tuple[int, int]:
        return self.number, index


def mix_orders(
    orders: Sequence[grain.MapDataset], weights: Sequence[float], epochs: int, strategy: str
) -> grain.MapDataset:
    """(component, index) of every document that is read. `orders` are those of one epoch."""
    if strategy == "first_exhausted":
        repeated = [order.repeat(epochs).map(Tag(number)) for number, order in enumerate(orders)]
        return grain.MapDataset.mix(repeated, weights=list(weights))
    counts = [len(order) for order in orders]
    read = documents_read(counts, weights, epochs, strategy)
    # One epoch more than is read, so that Grain does not end the mixture.
    repeated = [
        order.repeat(number // count + 2).map(Tag(part))
        for part, (order, number, count) in enumerate(zip(orders, read, counts, strict=True))
    ]
    return grain.MapDataset.mix(repeated, weights=list(weights))[: sum(read)]


def documents_read(
    counts: Sequence[int], weights: Sequence[float], epochs: int, strategy: str
) -> list[int]:
    """How many documents of each component the mixture reads."""
    # Grain rounds weights to these integers
    proportions = [int(weight * 100 / min(weights)) for weight in weights]
    total = sum(proportions)
    ends = [
        count * epochs / (proportion / total)
        for count, proportion in zip(counts, proportions, strict=True)
    ]
    if strategy == "first_exhausted":
        return component_counts(int(min(ends)), proportions)
    length = int(max(ends))
    while any(
        read < count * epochs
        for read, count in zip(component_counts(length, proportions), counts, strict=True)
    ):
        length += 1
    return component_counts(length, proportions)


def component_counts(length: int, proportions: Sequence[int]) -> list[int]:
    """How many of the first `length` documents of Grain's mixture come from each component."""
    read, rest, remaining = [], length, sum(proportions)
    for proportion in proportions:
        left = rest * (remaining - proportion) // remaining
        read.append(rest - left)
        rest, remaining = left, remaining - proportion
    return read


# Minimum of each data stream: streams of few documents have very different numbers of rows
STREAM_DOCUMENTS = 512
STREAM_CHUNKS = 4  # least number of chunks that each of several streams prefetches


@dataclass(frozen=True)
class MixtureComponent:
    """Documents, and their weight in a mixture."""

    documents: RecordSource
    weight: float = 1.0


def max_streams_of(components: Sequence[MixtureComponent]) -> int:
    """The number of data streams that the documents suffice for. Each stream caches decoded blocks:
    all together cache no more than one stream may.
    """
    if not components:
        return 1
    by_documents = min(len(component.documents) for component in components) // STREAM_DOCUMENTS
    by_memory = min(
        max_streams_in_memory(component.documents.blocks, component.documents.decoded)
        for component in components
    )
    return max(1, min(by_documents, by_memory))


def document_batches(
    config: MaxTextConfig,
    split: Split,
    row_format: RowFormat,
    shard: ShardSpec,
    components: Sequence[MixtureComponent],
    named_by: str,
) -> GrainBatches:
    """The batches of documents that can be read in any order. `named_by` is the key that names the
    data, for messages.
    """
    encoder = shared_encoder(config, split, row_format)
    bad = bad_records_of(encoder, config)
    if isinstance(encoder, TextEncoder):
        for component in components:
            for documents in files_of(component.documents):
                check_columns(config, split, type(encoder), documents.columns(), named_by)
    epochs = config.num_epoch if split is Split.TRAIN else 1
    seed = shuffle_seed(config, split)
    few = [component for component in components if len(component.documents) < shard.count]
    if few:
        raise ConfigError(
            f"{named_by} has {len(few[0].documents)} documents for {shard.count} streams, and each "
            "reads its own: lower data_streams, or if the run began with other files, name those "
            "or start under a new run_name"
        )
    orders = [
        epoch_order(
            len(component.documents),
            component.documents.blocks,
            shard,
            seed,
            component.documents.decoded,
        )
        for component in components
    ]
    size = min(documents_per_chunk(component.documents) for component in components)
    options = read_options(config, split, components, size, shard.local_streams)
    if len(components) == 1:
        # Chunks end with the epoch, so that a position is valid for any num_epoch.
        chunks = orders[0].batch(size, batch_fn=list).repeat(epochs)
        nothing = NothingToTrainOn(no_rows(config, row_format, shard, named_by))
        loaded = chunks.map(LoadDocuments(components[0].documents, encoder, bad, nothing))
    else:
        mixture = mix_orders(
            orders,
            [component.weight for component in components],
            epochs,
            config.mixture_stopping_strategy,
        )
        if shard.index == 0:
            report_mixture(config, components, named_by)
        loaded = mixture.batch(size, batch_fn=list).map(
            LoadMixture(
                [LoadDocuments(component.documents, encoder, bad) for component in components]
            )
        )
    settings: Json = {
        "stream": shard.index,
        "streams": shard.count,
        "documents": sum(len(component.documents) for component in components),
        "packet": size,
        **encoder.position_fingerprint(),
    }
    if len(components) > 1:
        settings["mixture"] = [
            [len(component.documents), component.weight] for component in components
        ]
    return to_token_batches(
        config, split, row_format, shard, loaded.to_iter_dataset(options), settings, named_by
    )


def record_batches(
    config: MaxTextConfig,
    split: Split,
    row_format: RowFormat,
    shard: ShardSpec,
    records: grain.IterDataset,
    named_by: str,
    settings: Json,
) -> GrainBatches:
    """The batches of records that can only be read in order: (number, record) of this stream, all
    epochs.
    """
    encoder = shared_encoder(config, split, row_format)
    nothing = NothingToTrainOn(no_rows(config, row_format, shard, named_by))
    encode = EncodeRecords(named_by, encoder, bad_records_of(encoder, config), nothing)
    chunks = records.batch(MAX_CHUNK_DOCUMENTS, batch_fn=list).map(encode)
    settings = {
        "stream": shard.index,
        "streams": shard.count,
        **settings,
        **encoder.position_fingerprint(),
    }
    return to_token_batches(config, split, row_format, shard, chunks, settings, named_by)


def files_of(documents: RecordSource) -> Sequence[RecordSource]:
    """The files of documents, which may have different columns, or the documents themselves."""
    return documents.files if isinstance(documents, Documents) else [documents]


def to_token_batches(
    config: MaxTextConfig,
    split: Split,
    row_format: RowFormat,
    shard: ShardSpec,
    chunks: grain.IterDataset,
    settings: Json,
    named_by: str,
) -> GrainBatches:
    """Batches from chunks of token ids, or of rows of fine-tuning."""
    packing, seed = packing_type(config), shuffle_seed(config, split)
    rows = row_format.to_rows(config, chunks, seed)
    window = shard.window(config.grain_shuffle_buffer_size) if seed is not None else 1
    # The rows of a long document are consecutive; shuffled, they do not fill a batch of their own.
    if seed is not None and window > 1:
        rows = WindowShuffle(rows, window, seed)
    settings = {
        "dataset_type": config.dataset_type.value,
        **settings,
        "data_shuffle_seed": seed,
        "grain_shuffle_buffer_size": window,
        "grain_packing_type": packing,
        "max_segments_per_seq": config.max_segments_per_seq if packing else None,
        "max_target_length": config.max_target_length,
        "use_truncation": config.use_truncation,
    }
    iterator = GrainBatches(to_batches(rows, shard, keeps_last(config, split)), settings)
    if iterator.first_rows < max(shard.min_rows, 1):
        iterator.close()
        raise too_little_data(config, split, row_format, shard, chunks, named_by)
    return iterator


def shuffle_seed(config: MaxTextConfig, split: Split) -> int | None:
    return (
        config.data_shuffle_seed % 2**32
        if config.enable_data_shuffling and split is Split.TRAIN
        else None
    )


def report_mixture(
    config: MaxTextConfig, components: Sequence[MixtureComponent], named_by: str
) -> None:
    """Log how often each component of a training mixture is read."""
    counts = [len(component.documents) for component in components]
    weights, strategy = (
        [component.weight for component in components],
        config.mixture_stopping_strategy,
    )
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
        "%s: the mixture has %s documents and ends after %d; with mixture_stopping_strategy=%s and "
        "num_epoch=%d its parts are read %s times%s",
        named_by,
        " + ".join(map(str, counts)),
        sum(read),
        strategy,
        config.num_epoch,
        times,
        advice,
    )


class LoadMixture:
    def __init__(self, loads: Sequence[LoadDocuments]):
        self.loads = loads

    def __call__(self, tagged: Sequence[tuple[int, int]]) -> list[object]:
        # Sorted by component within a chunk: rows are shuffled again after packing.
        return [
            tokens
            for number, load in enumerate(self.loads)
            for tokens in load([index for component, index in tagged if component == number])
        ]


def read_options(
    config: MaxTextConfig,
    split: Split,
    components: Sequence[MixtureComponent],
    chunk: int,
    local_streams: int,
) -> grain.ReadOptions:
    """Threads and prefetched chunks, within this stream's part of grain_ram_budget_mb."""
    if split is Split.TRAIN:
        threads, num_prefetched = config.grain_num_threads, config.grain_prefetch_buffer_size
    else:
        threads, num_prefetched = (
            config.grain_num_threads_eval,
            config.grain_prefetch_buffer_size_eval,
        )
    # A batch takes rows from every stream, so each has some chunks ready.
    threads = min(threads, max(-(-threads // local_streams), STREAM_CHUNKS))
    num_prefetched = min(
        num_prefetched, max(-(-num_prefetched // local_streams), STREAM_CHUNKS * chunk)
    )
    budget = config.grain_ram_budget_mb * 2**20 // local_streams
    fits = max(
        min(
            documents_within(component.documents, budget, num_prefetched)
            for component in components
        ),
        1,
    )
    if fits < num_prefetched:
        LOGGER.info(
            "prefetching %d large documents instead of %d, to stay within grain_ram_budget_mb",
            fits,
            num_prefetched,
        )
    num_prefetched = -(-min(fits, num_prefetched) // chunk)
    return grain.ReadOptions(
        num_threads=min(threads, num_prefetched), prefetch_buffer_size=num_prefetched
    )


def documents_within(documents: RecordSource, budget: int, max_count: int) -> int:
    """How many documents fit in a budget of bytes, at most `max_count`. If their sizes are known,
    the largest ones are counted.
    """
    sizes = documents.sizes
    if sizes is None:
        return min(int(budget * len(documents) / max(documents.nbytes, 1)), max_count)
    if int(sizes.max(initial=0)) * max_count <= budget:  # a fast check that holds for most data
        return max_count
    count = min(max_count, len(sizes))
    largest = np.sort(np.partition(sizes, len(sizes) - count)[len(sizes) - count :])[::-1]
    within = int(np.searchsorted(np.cumsum(largest, dtype=np.int64), budget, side="right"))
    return max_count if within == len(largest) else within


def no_rows(
    config: MaxTextConfig, row_format: RowFormat, shard: ShardSpec, named_by: str
) -> ConfigError:
    """The error for data without anything to train on."""
    return ConfigError(row_format.no_rows(config, named_by, stream_of(shard)))


def stream_of(shard: ShardSpec) -> str:
    return f" for stream {shard.index} of {shard.count}" if shard.count > 1 else ""


def too_little_data(
    config: MaxTextConfig,
    split: Split,
    row_format: RowFormat,
    shard: ShardSpec,
    chunks: Any,
    named_by: str,
) -> ConfigError:
    """The error for data that does not fill a batch, with the counts that show why."""
    targets = [num_targets(document) for chunk in chunks for document in chunk]
    if not targets or split is Split.EVAL:
        return no_rows(config, row_format, shard, named_by)
    size = DataSize(named_by, stream_of(shard), targets, shard.min_rows or shard.rows)
    return TooLittleData(row_format.too_little_data(config, size))
