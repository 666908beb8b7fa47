"""The formats of a row of the data: a document, a row of supervised fine-tuning, a preference pair
or the prompt of reinforcement learning.

A training method hands its format to the input pipeline, which never asks for the method. A format
says how records are encoded, which fields a batch has, and what is missing from data that is too
small.
"""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.encode import Encoder, RecordEncoder, data_columns
from maxtext.input_pipeline.encode_rows import (
    PairEncoder,
    PromptEncoder,
    RowEncoder,
    ScoredPairEncoder,
    TextEncoder,
)
from maxtext.input_pipeline.interface import (
    FIELDS,
    PAIR_FIELDS,
    BatchIterator,
    LongDocuments,
    ShardSpec,
    Split,
)

if TYPE_CHECKING:
    import grain  # importing it takes seconds

TEACHER_LOGITS = "maxtext.input_pipeline.teacher_logits:teacher_logits_source"

# Encoders in use
ENCODERS: "WeakValueDictionary[tuple[type, Split, str], RecordEncoder]" = WeakValueDictionary()
ENCODERS_LOCK = threading.Lock()


@dataclass(frozen=True)
class DataSize:
    """Data that does not fill a batch of `rows_per_batch` rows. `targets` are the numbers of
    targets of its documents or rows."""

    named_by: str  # the key that names the data
    stream: str  # " for stream 0 of 4" if there are several
    targets: list[int]
    rows_per_batch: int


@dataclass(frozen=True)
class RowFormat(ABC):
    """`train_source`: module:function of a source that replaces the training data of
    dataset_type."""

    encoder: type[RecordEncoder]
    fields: tuple[str, ...] = FIELDS
    has_records: bool = False  # batches hold Python objects, which cost much to send to a process
    train_source: str | None = None

    @property
    def has_masks(self) -> bool:
        """Whether rows are recognised by their columns, and have masks of the tokens in the loss.
        Documents are one column, and all their tokens are trained on."""
        return issubclass(self.encoder, TextEncoder)

    @abstractmethod
    def to_rows(
        self, config: MaxTextConfig, chunks: "grain.IterDataset", seed: int | None
    ) -> "grain.IterDataset":
        """Rows with `fields`, each [max_target_length], from chunks of encoded records. `seed`
        shuffles the rows that are packed together."""

    @abstractmethod
    def no_rows(self, config: MaxTextConfig, named_by: str, stream: str) -> str:
        """The error for data without anything to train on."""

    @abstractmethod
    def too_little_data(self, config: MaxTextConfig, size: DataSize) -> str:
        """The error for data that does not fill a batch."""


@dataclass(frozen=True)
class SequenceRows(RowFormat):
    """Documents or masked rows, which are packed."""

    def to_rows(
        self, config: MaxTextConfig, chunks: "grain.IterDataset", seed: int | None
    ) -> "grain.IterDataset":
        import grain

        from maxtext.input_pipeline.packing import ToSequences, packing_type, to_rows

        packing, length = packing_type(config), config.max_target_length
        sequences = grain.experimental.FlatMapIterDataset(
            chunks, ToSequences(length, long_documents(config, packing))
        )
        return to_rows(sequences, packing, length, config.max_segments_per_seq, seed)

    def no_rows(self, config: MaxTextConfig, named_by: str, stream: str) -> str:
        wanted = (
            "row with a token to train on" if self.has_masks else "document of two tokens or more"
        )
        return f"{named_by} has no {wanted}{stream}, so nothing to predict"

    def too_little_data(self, config: MaxTextConfig, size: DataSize) -> str:
        length, min_rows = config.max_target_length, size.rows_per_batch
        total = sum(size.targets)
        used = total
        if config.use_truncation:
            used = sum(min(count, length) for count in size.targets)
        if not used:
            return self.no_rows(config, size.named_by, size.stream)
        lost = total - used
        advice = f"set use_truncation=false, which now leaves out {lost} tokens, " if lost else ""
        num_documents = sum(count > 0 for count in size.targets)
        unpacked = "" if config.packing else f" in {num_documents} documents, one a row"
        return (
            f"{size.named_by} has {used} tokens{unpacked} in num_epoch={config.num_epoch}"
            f"{size.stream}, but one batch needs {min_rows * length} ({min_rows} sequences of "
            f"max_target_length={length}): {advice}add text, raise num_epoch, or lower "
            "per_device_batch_size or max_target_length"
        )


@dataclass(frozen=True)
class PairRows(RowFormat):
    """Preference pairs: a row has both sequences, and is not packed."""

    def to_rows(
        self, config: MaxTextConfig, chunks: "grain.IterDataset", seed: int | None
    ) -> "grain.IterDataset":
        import grain

        from maxtext.input_pipeline.packing import ToPreferencePairs, pad_pair

        pairs = grain.experimental.FlatMapIterDataset(chunks, ToPreferencePairs())
        return pairs.map(partial(pad_pair, length=config.max_target_length))

    def no_rows(self, config: MaxTextConfig, named_by: str, stream: str) -> str:
        return f"{named_by} has no row with a token to train on{stream}, so nothing to predict"

    def too_little_data(self, config: MaxTextConfig, size: DataSize) -> str:
        return (
            f"{size.named_by} has {len(size.targets)} pairs in num_epoch={config.num_epoch}"
            f"{size.stream}, but one batch needs {size.rows_per_batch}: add pairs, raise num_epoch "
            "or lower per_device_batch_size"
        )


@dataclass(frozen=True)
class ScoredPairRows(PairRows):
    """Preference pairs with their margins."""

    def to_rows(
        self, config: MaxTextConfig, chunks: "grain.IterDataset", seed: int | None
    ) -> "grain.IterDataset":
        import grain

        from maxtext.input_pipeline.packing import ToRecords, pad_scored_pair

        pairs = grain.experimental.FlatMapIterDataset(chunks, ToRecords())
        return pairs.map(partial(pad_scored_pair, length=config.max_target_length))


@dataclass(frozen=True)
class PromptRows(RowFormat):
    """Prompts, with the columns of their records."""

    def to_rows(
        self, config: MaxTextConfig, chunks: "grain.IterDataset", seed: int | None
    ) -> "grain.IterDataset":
        import grain

        from maxtext.input_pipeline.packing import ToRecords, pad_prompt

        prompts = grain.experimental.FlatMapIterDataset(chunks, ToRecords())
        return prompts.map(partial(pad_prompt, length=config.max_target_length))

    def no_rows(self, config: MaxTextConfig, named_by: str, stream: str) -> str:
        return (
            f"{named_by} has no prompt of at most max_prefill_predict_length="
            f"{config.max_prefill_predict_length} tokens{stream}: raise it, or add shorter prompts"
        )

    def too_little_data(self, config: MaxTextConfig, size: DataSize) -> str:
        return (
            f"{size.named_by} has {len(size.targets)} prompts in num_epoch={config.num_epoch}"
            f"{size.stream}, but one batch needs {size.rows_per_batch}: add prompts, raise "
            "num_epoch or lower batch_size"
        )


def long_documents(config: MaxTextConfig, packing: str | None) -> LongDocuments:
    if config.use_truncation:
        return LongDocuments.CUT
    return LongDocuments.WHOLE if packing == "concat_then_split" else LongDocuments.SPLIT


DOCUMENTS = SequenceRows(Encoder)
MASKED_ROWS = SequenceRows(RowEncoder)
PREFERENCE_PAIRS = PairRows(PairEncoder, PAIR_FIELDS)
SCORED_PAIRS = ScoredPairRows(ScoredPairEncoder, PAIR_FIELDS)
PROMPTS = PromptRows(PromptEncoder, has_records=True)


def with_teacher_logits(rows: RowFormat) -> RowFormat:
    """The format of a run whose training rows were written with the logits of a teacher."""
    return replace(rows, train_source=TEACHER_LOGITS)


class DataSource(Protocol):
    """Creates the iterator of one shard of a split, or None if the configuration names no
    evaluation data.
    """

    def __call__(
        self, config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
    ) -> BatchIterator | None: ...


def columns_to_read(config: MaxTextConfig, split: Split, row_format: RowFormat) -> list[str]:
    """The columns that files have to have; none if all are read, and the form of a row follows from
    them.
    """
    return [] if row_format.has_masks else data_columns(config, split)


def shared_encoder(config: MaxTextConfig, split: Split, row_format: RowFormat) -> RecordEncoder:
    """The encoder of a configuration, shared by all data streams of a process: a tokenizer is slow
    to load, and caches pre-tokens.
    """
    key = (row_format.encoder, split, config.model_dump_json())
    with ENCODERS_LOCK:
        encoder = ENCODERS.get(key)
        if encoder is None:
            encoder = ENCODERS[key] = row_format.encoder(config, split)
    return encoder
