"""dataset_type=hf: datasets by the names that Hugging Face's `datasets` uses.

- Local files of a loader (hf_path=parquet, json, arrow or text with hf_train_files; or no hf_path,
  and the loader follows from the files' names) are read by the pipeline itself: shuffled globally,
  resumed at once, without `datasets`.
- Everything else (a name on the hub, a folder with a dataset, another loader, files behind a URL)
  is streamed by `datasets`, in its own order and shuffled within a window of RECORD_WINDOW records.
  The state is that of the `datasets` stream at the start of the window, so resuming is also exact.
"""

import copy
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grain

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.extras import require
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.encode_rows import TextEncoder, check_columns
from maxtext.input_pipeline.formats import Record, find_files, kind_of, open_files
from maxtext.input_pipeline.interface import BatchIterator, ShardSpec, Split
from maxtext.input_pipeline.order import WindowShuffle
from maxtext.input_pipeline.pipeline import (
    MixtureComponent,
    document_batches,
    max_streams_of,
    record_batches,
    shuffle_seed,
)
from maxtext.input_pipeline.row_formats import RowFormat, columns_to_read

RECORD_WINDOW = 2048
# load_dataset is not thread-safe (its progress bars), and several threads open data streams
LOADING = threading.Lock()
# Loader of `datasets` for local files -> kind of file (formats/)
LOADERS = {"parquet": "parquet", "json": "jsonl", "arrow": "arrow", "text": "lines"}


def hf_source(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator | None:
    files = named_files(config, split)
    if split is Split.EVAL and not files and not config.hf_eval_split:
        return None
    if components := load_components(config, split, row_format):
        return document_batches(
            config, split, row_format, shard, components, f"hf_{split.value}_files"
        )
    seed = shuffle_seed(config, split)
    epochs = config.num_epoch if split is Split.TRAIN else 1
    records: grain.IterDataset = StreamingDataset(
        lambda: open_stream(config, split, row_format, shard), config.hf_path, epochs
    )
    if seed is not None:
        records = WindowShuffle(records, shard.window(RECORD_WINDOW), seed)
    settings = {"hf_path": config.hf_path, "hf_name": config.hf_name, "files": files or None}
    return record_batches(config, split, row_format, shard, records, config.hf_path, settings)


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    if components := load_components(config, split, row_format):
        return max_streams_of(components)
    # Each stream reads its own shards. With more streams than shards, each would read everything.
    return max(open_stream(config, split, row_format, ShardSpec(1)).num_shards, 1)


def supports_stream_count(
    config: MaxTextConfig, split: Split, row_format: RowFormat
) -> Callable[[int], bool]:
    """`datasets` assigns shards to streams only if they divide evenly; otherwise each stream reads
    everything.
    """
    files = named_files(config, split)
    if split is Split.EVAL and not files and not config.hf_eval_split:
        return lambda count: count == 1  # there is no evaluation data
    most = max_data_streams(config, split, row_format)
    if is_local(config, split, files):
        return lambda count: count <= most
    return lambda count: most % count == 0


def load_components(
    config: MaxTextConfig, split: Split, row_format: RowFormat
) -> list[MixtureComponent]:
    """The documents of local files. Empty if `datasets` streams the records."""
    files = named_files(config, split)
    return (
        [local_component(config, split, row_format, files)]
        if is_local(config, split, files)
        else []
    )


def named_files(config: MaxTextConfig, split: Split) -> str:
    return ((config.hf_train_files if split is Split.TRAIN else config.hf_eval_files) or "").strip()


def is_local(config: MaxTextConfig, split: Split, files: str) -> bool:
    if not config.hf_path and not files:
        raise ConfigError(
            "dataset_type=hf needs hf_path, the name of a dataset, or hf_train_files: set one"
        )
    if config.hf_path in LOADERS and not files and not config.hf_data_dir:
        # `datasets` would read the files of the current folder.
        raise ConfigError(
            f"hf_path={config.hf_path} is a kind of files: name the files in hf_{split.value}_files"
        )
    return bool(files) and "://" not in files and (not config.hf_path or config.hf_path in LOADERS)


def local_component(
    config: MaxTextConfig, split: Split, row_format: RowFormat, value: str
) -> MixtureComponent:
    key = f"hf_{split.value}_files"
    if config.hf_name or config.hf_data_dir:
        wrong = (
            f"hf_name={config.hf_name}" if config.hf_name else f"hf_data_dir={config.hf_data_dir}"
        )
        raise ConfigError(
            f"{wrong} is a part of a dataset on the hub, and {key} names files: leave it out"
        )
    files = find_files(key, value)
    kind = LOADERS.get(config.hf_path)
    if kind is None:
        kinds = {kind_of(file) for file in files}
        if len(kinds) > 1 or not kinds <= {"parquet", "jsonl", "arrow", "text"}:
            raise ConfigError(
                f"{key}={value}: set hf_path to the kind of these files, one of "
                f"{', '.join(LOADERS)}"
            )
        kind = "lines" if kinds == {"text"} else str(kinds.pop())
    return MixtureComponent(
        open_files(
            files,
            kind,
            columns_to_read(config, split, row_format),
            config.grain_data_source_max_workers,
        )
    )


def open_stream(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> Any:
    """The `datasets` stream of the records of a shard."""
    datasets = require("datasets", "dataset_type=hf with a name of the hub")
    files, names = named_files(config, split), columns_to_read(config, split, row_format)
    data_files = [part.strip() for part in files.split(",") if part.strip()] or None
    wanted = (
        config.train_split
        if split is Split.TRAIN or not config.hf_eval_split
        else config.hf_eval_split
    )
    if data_files and split is Split.EVAL and not config.hf_eval_split:
        wanted = "train"  # what `datasets` calls files without a split of their own
    try:
        with LOADING:
            stream = datasets.load_dataset(
                config.hf_path,
                name=config.hf_name,
                data_dir=config.hf_data_dir,
                data_files=data_files,
                split=wanted,
                streaming=True,
                token=config.hf_access_token,
            )
        columns = stream.column_names or list(next(iter(stream), dict.fromkeys(names)))
    except Exception as error:  # of many kinds: connections, names, splits, formats
        where = f"hf_path={config.hf_path}" + (f", files {files}" if files else "")
        raise ConfigError(
            f"{where}, split {wanted}: `datasets` cannot open it: {error_line(error)}"
        ) from error
    missing = [name for name in names if name not in columns]
    if missing:
        raise ConfigError(
            f"{split.value}_data_columns: {config.hf_path} has no column {missing[0]}, only "
            f"{', '.join(columns)}"
        )
    if issubclass(row_format.encoder, TextEncoder):
        check_columns(config, split, row_format.encoder, columns, config.hf_path)
    else:
        stream = stream.select_columns(names)
    if shard.count > 1:
        stream = require("datasets.distributed", "dataset_type=hf").split_dataset_by_node(
            stream, rank=shard.index, world_size=shard.count
        )
    return stream


def error_line(error: Exception) -> str:
    """The first line of an error of `datasets`, shortened."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 300, placeholder=" …")


class StreamingDataset(grain.IterDataset):
    """(number, record) of a `datasets` stream, repeated for `epochs` epochs."""

    def __init__(self, make: Callable[[], Any], name: str, epochs: int):
        super().__init__()
        self.make = make
        self.name = name
        self.epochs = epochs

    def __iter__(self) -> grain.DatasetIterator:
        return StreamingIterator(self)


class StreamingIterator(grain.DatasetIterator):
    def __init__(self, dataset: StreamingDataset):
        super().__init__()
        self.dataset = dataset
        self.move(0, 0, None)

    def move(self, epoch: int, number: int, position: Json | None) -> None:
        self.epoch, self.number = epoch, number
        self.stream = self.dataset.make()
        if position is not None:
            self.stream.load_state_dict(position)
        self.records: Iterator[Record] = iter(self.stream)

    def __next__(self) -> tuple[int, Record]:
        while self.epoch < self.dataset.epochs:
            try:
                record = next(self.records)
            except StopIteration:
                if not self.number:  # the stream has no records
                    break
                self.move(self.epoch + 1, 0, None)
                continue
            except Exception as error:  # whatever the reader of the stream raises
                raise UserError(
                    f"{self.dataset.name}: record {self.number} cannot be read: "
                    f"{error_line(error)}; repair the data, since a stream cannot skip it"
                ) from error
            self.number += 1
            return self.number - 1, record
        raise StopIteration

    def get_state(self) -> Json:
        # A copy, since `datasets` changes the state in place.
        position = copy.deepcopy(self.stream.state_dict()) if self.number else None
        return {"epoch": self.epoch, "number": self.number, "position": position}

    def set_state(self, state: Json) -> None:
        self.move(state["epoch"], state["number"], state["position"])
