"""dataset_type=tfds: datasets that TensorFlow Datasets has prepared, without TensorFlow.

The library `tfds` gives the files and records of a split, also of a part such as train[:10%]. The
files, ArrayRecord or TFRecord, are read by the pipeline itself, in random order and shuffled
globally.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.common.files import is_remote, path_problem
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.formats import Documents, Record, open_files
from maxtext.input_pipeline.interface import BatchIterator, ShardSpec, Split
from maxtext.input_pipeline.pipeline import MixtureComponent, document_batches, max_streams_of
from maxtext.input_pipeline.row_formats import RowFormat, columns_to_read

# File format of `tfds` -> kind of file (formats/)
KINDS = {"array_record": "arrayrecord", "tfrecord": "tfrecord"}


def tfds_source(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator | None:
    key = "dataset_name" if split is Split.TRAIN else "eval_dataset_name"
    return document_batches(
        config, split, row_format, shard, load_components(config, split, row_format), key
    )


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    return max_streams_of(load_components(config, split, row_format))


def load_components(
    config: MaxTextConfig, split: Split, row_format: RowFormat
) -> list[MixtureComponent]:
    """The documents of the configured split, as one component."""
    train = split is Split.TRAIN
    key, name = (
        ("dataset_name", config.dataset_name)
        if train
        else ("eval_dataset_name", config.eval_dataset_name)
    )
    wanted = config.train_split if train else config.eval_split
    info = open_dataset(key, name, config.dataset_path).info
    kind = KINDS.get(info.file_format.value)
    if kind is None:
        raise ConfigError(
            f"{key}={name} is stored as {info.file_format.value}: prepare it as array_record"
        )
    try:
        instructions = [
            instruction
            for instruction in info.splits[wanted].file_instructions
            if instruction.examples_in_shard
        ]
    except (KeyError, ValueError) as error:
        splits = ", ".join(info.splits) or "none"
        raise ConfigError(
            f"{'train' if train else 'eval'}_split={wanted}: {key}={name} has {splits}"
        ) from error
    if not instructions:
        raise ConfigError(
            f"{'train' if train else 'eval'}_split={wanted} of {key}={name} has no records"
        )
    paths = [str(instruction.filename) for instruction in instructions]
    files = open_files(
        paths,
        kind,
        columns_to_read(config, split, row_format),
        config.grain_data_source_max_workers,
    )
    return [MixtureComponent(FileRanges(files, instructions))]


def open_dataset(key: str, name: str, folder: str) -> Any:
    """The `tfds` builder of a prepared dataset, by name and data_dir, or by its own folder."""
    if is_remote(folder):
        raise ConfigError(f"dataset_path={folder} {path_problem(folder)}")
    tfds = require("tensorflow_datasets", "dataset_type=tfds")
    try:
        return tfds.builder(name, data_dir=folder or None)
    except (tfds.core.DatasetNotFoundError, ValueError, AssertionError, OSError) as error:
        where = folder or "the default folder of tfds"
        raise ConfigError(
            f"{key}={name} is not prepared in {where}: set dataset_path to the data_dir where it "
            f"is ({str(error).strip().splitlines()[0]})"
        ) from error


class FileRanges:
    """The documents of a split: `take` records (-1: all) after `skip` of each file."""

    blocks: np.ndarray | None = None
    sizes: np.ndarray | None = None

    def __init__(self, files: Documents, instructions: Sequence[Any]):
        self.files = files
        self.nbytes = files.nbytes
        self.decoded = files.decoded
        shards = np.array([instruction.examples_in_shard for instruction in instructions])
        skips = np.array([instruction.skip for instruction in instructions])
        takes = np.array([instruction.take for instruction in instructions])
        counts = np.where(takes < 0, shards - skips, takes)
        self.ends = np.cumsum(counts)
        # Document i has index i + shifts[its file] in the files.
        self.shifts = np.cumsum(shards) - shards + skips - (self.ends - counts)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Record:
        return self.files[self.index_in_files(index)]

    def where(self, index: int) -> tuple[str, str]:
        return self.files.where(self.index_in_files(index))

    def index_in_files(self, index: int) -> int:
        return index + int(self.shifts[np.searchsorted(self.ends, index, side="right")])

    def columns(self) -> list[str] | None:
        return self.files.columns()
