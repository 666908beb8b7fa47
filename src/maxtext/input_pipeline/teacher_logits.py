"""Rows of training with the largest logits of a teacher (offline_data_dir), in two formats.

Parquet files, written by `write_part`: `logits.json` says K, the length T of rows and the
vocabulary; `part-00000.parquet` … hold the rows. A row has the fields of a batch [T],
`top_k_logits` [T, K] in float16 and `top_k_indices` [T, K] in int32, their indices in the
vocabulary. A part is written under a temporary name and then renamed, so that an interrupted job
continues after its last part.

ArrayRecord files, as MaxText's save_top_k_teacher_logits writes them, in a folder without
logits.json: a record is a batch. It has `tokens` [B, T], `top_k_logits` and `top_k_indices`
[B, T, K], and optionally `inputs_position`, `inputs_segmentation`, `targets` and
`targets_segmentation`, in the safetensors format or, of earlier versions, pickled. Nothing but
arrays is unpickled.
"""

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.extras import require
from maxtext.common.files import local_path, write_text
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.formats.example import open_reader
from maxtext.input_pipeline.interface import (
    FIELDS,
    Batch,
    BatchIterator,
    ShardSpec,
    Split,
    State,
    check_position,
    seal,
    unseal,
)
from maxtext.input_pipeline.row_formats import RowFormat

MANIFEST = "logits.json"
TOP_K_FIELDS: dict[str, np.dtype] = {
    "top_k_logits": np.dtype(np.float16),
    "top_k_indices": np.dtype(np.int32),
}
FORMAT_KEYS = ("top_k", "max_target_length", "vocab_size")


def part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.parquet"


def create_folder(folder: Path, settings: Mapping[str, int]) -> None:
    """Create a folder for these settings. Raises ConfigError if it holds rows of other ones."""
    path = folder / MANIFEST
    if path.is_file():
        saved = read_manifest(folder)
        for name, value in settings.items():
            if saved.get(name) != value:
                raise ConfigError(
                    f"{folder} was written with {name}={saved.get(name)}, not {value}: name "
                    "another folder"
                )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder, or one to continue")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(str(path), json.dumps(dict(settings)) + "\n")


def read_manifest(folder: Path) -> Json:
    path = folder / MANIFEST
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no logits of a teacher (neither {MANIFEST} nor ArrayRecord files can "
            "be read): write them with `maxtext distill-logits`"
        ) from error
    if not isinstance(settings, dict) or not all(
        isinstance(settings.get(key), int) for key in FORMAT_KEYS
    ):
        raise UserError(f"{path} must have the numbers {', '.join(FORMAT_KEYS)}")
    return settings


def write_part(path: Path, batch: Batch) -> None:
    """Write the rows of a batch, which has also the fields TOP_K_FIELDS."""
    pyarrow = require("pyarrow", "writing logits")
    parquet = require("pyarrow.parquet", "writing logits")
    columns = {}
    for name, field in batch.items():
        values = pyarrow.array(np.ascontiguousarray(field).reshape(-1))
        columns[name] = pyarrow.FixedSizeListArray.from_arrays(values, field[0].size)
    temporary = path.with_name(f".{path.name}.tmp")
    parquet.write_table(pyarrow.table(columns), temporary)
    temporary.replace(path)
    read_part.cache_clear()


def has_part(path: Path, inputs: np.ndarray) -> bool:
    """Whether a part exists with rows of these inputs [rows, T]. One with fewer rows was the end of
    a shorter job. Raises UserError for a part with other rows."""
    if not path.is_file():
        return False
    stored = read_part(path, inputs.shape[1])["inputs"]
    if not np.array_equal(stored, inputs[: len(stored)]):
        raise UserError(f"{path} holds other rows than the data: name another folder")
    return len(stored) == len(inputs)


@lru_cache(maxsize=4)
def read_part(path: Path, length: int) -> Batch:
    parquet = require("pyarrow.parquet", "reading logits")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    batch = {}
    for name in (*FIELDS, *TOP_K_FIELDS):
        values = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        shape = (table.num_rows, length)
        batch[name] = values.reshape(*shape, -1) if name in TOP_K_FIELDS else values.reshape(shape)
    return batch


@dataclass(frozen=True)
class Part:
    """Rows that are read together: a Parquet file, or a record of an ArrayRecord file."""

    path: Path
    rows: int
    record: int | None = None

    def read(self, length: int) -> Batch:
        if self.record is None:
            return read_part(self.path, length)
        batch = read_record(self.path, self.record)
        if batch["inputs"].shape != (self.rows, length):
            raise UserError(
                f"record {self.record} of {self.path} has {batch['inputs'].shape[0]} rows of "
                f"{batch['inputs'].shape[1]} tokens, not {self.rows} of {length} like the first"
            )
        return batch


def top_k_of(config: MaxTextConfig) -> int:
    """K of offline_data_dir. Raises ConfigError if its rows are not for this model."""
    folder = local_path(config.offline_data_dir or "")
    files = array_record_files(folder)
    settings = record_settings(files[0]) if files else read_manifest(folder)
    if settings["max_target_length"] != config.max_target_length:
        raise ConfigError(
            f"offline_data_dir={folder} has rows of {settings['max_target_length']} tokens, and "
            f"this run has max_target_length={config.max_target_length}: they must be equal"
        )
    # Of ArrayRecord files, the largest index is all that is known of the vocabulary.
    is_same = settings["vocab_size"] == config.vocab_size
    if not (is_same or (files and settings["vocab_size"] < config.vocab_size)):
        raise ConfigError(
            f"offline_data_dir={folder} was written with vocab_size={settings['vocab_size']}"
            f"{' or more' if files else ''}, and this run has vocab_size={config.vocab_size}: they "
            "must be equal"
        )
    return settings["top_k"]


def array_record_files(folder: Path) -> list[Path]:
    return [] if (folder / MANIFEST).is_file() else record_files(folder)


def record_settings(path: Path) -> dict[str, int]:
    """As of logits.json, from the first record of a file."""
    indices = read_record(path, 0)["top_k_indices"]
    _, length, top_k = indices.shape
    return {
        "top_k": top_k,
        "max_target_length": length,
        "vocab_size": int(indices.max()) + 1,
    }


def find_parts(folder: Path) -> list[Part]:
    """The parts of a folder, in order. Every record of ArrayRecord files has as many rows as the
    first."""
    files = array_record_files(folder)
    if files:
        rows = len(read_record(files[0], 0)["inputs"])
        return [Part(file, rows, index) for file in files for index in range(count_records(file))]
    parquet = require("pyarrow.parquet", "reading logits")
    parts = sorted(folder.glob("part-*.parquet"))
    if not parts:
        raise UserError(f"{folder} holds no complete part: run `maxtext distill-logits` again")
    return [Part(part, parquet.read_metadata(part).num_rows) for part in parts]


def teacher_logits_source(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator:
    top_k_of(config)
    folder = local_path(config.offline_data_dir or "")
    return TeacherLogits(find_parts(folder), config.max_target_length, config.num_epoch, shard)


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    return sum(part.rows for part in find_parts(local_path(config.offline_data_dir or "")))


class TeacherLogits(BatchIterator):
    """The rows of a shard, in the order of the files, which is that of the data that was written;
    `epochs` times."""

    def __init__(self, parts: Sequence[Part], length: int, epochs: int, shard: ShardSpec):
        self.parts = parts
        self.ends = np.cumsum([part.rows for part in parts])
        self.length = length
        self.shard = shard
        self.rows = np.arange(shard.index, self.ends[-1], shard.count)
        self.total = len(self.rows) * epochs
        self.position = 0

    @property
    def settings(self) -> Json:
        return {"dataset_type": "offline_data_dir", "rows": int(self.ends[-1])}

    def __next__(self) -> Batch:
        last = min(self.position + self.shard.rows, self.total)
        count = last - self.position
        if count == 0 or (count < self.shard.rows and not self.shard.min_rows):
            raise StopIteration
        rows = [self.read_row(number) for number in range(self.position, last)]
        self.position = last
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def read_row(self, number: int) -> Batch:
        row = self.rows[number % len(self.rows)]
        part = int(np.searchsorted(self.ends, row, side="right"))
        first = self.ends[part - 1] if part else 0
        fields = self.parts[part].read(self.length)
        return {name: field[row - first] for name, field in fields.items()}

    def get_state(self) -> State:
        return seal(self.settings, {"row": self.position})

    def set_state(self, state: State) -> None:
        position = unseal(self.settings, state)["row"]
        check_position(position, self.total)
        self.position = position

    def reset(self) -> None:
        self.position = 0


SUFFIX = ".array_record"
DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "U32": np.uint32,
}
REQUIRED = ("tokens", "top_k_logits", "top_k_indices")
# What pickles of arrays name
ARRAY_NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("ml_dtypes", "bfloat16"),
}


class ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")  # the name before numpy 2
        if (module, name) not in ARRAY_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        return super().find_class(module, name)


def record_files(path: Path) -> list[Path]:
    """The ArrayRecord files of a folder, in order, or the file itself."""
    if path.suffix == SUFFIX and path.is_file():
        return [path]
    return sorted(path.glob(f"*{SUFFIX}"))


@lru_cache(maxsize=4)
def open_file(path: Path) -> Any:
    reader = open_reader(str(path))
    if not reader.ok():
        raise UserError(f"{path} is not an ArrayRecord file, or is damaged")
    return reader


def count_records(path: Path) -> int:
    return open_file(path).num_records()


@lru_cache(maxsize=4)
def read_record(path: Path, index: int) -> Batch:
    """The rows of a record, with FIELDS, `top_k_logits` and `top_k_indices`."""
    where = f"record {index} of {path}"
    try:
        (record,) = open_file(path).read([index])
        arrays = parse_record(record)
    except (RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise UserError(f"{where} has no {missing[0]}: it is not of save_top_k_teacher_logits")
    rows, length = arrays["tokens"].shape
    shapes = {arrays[name].shape[:2] for name in (*FIELDS, *REQUIRED) if name in arrays}
    if shapes != {(rows, length)}:
        raise UserError(f"{where} has fields of different shapes: {sorted(shapes)}")
    return with_all_fields(arrays)


def parse_record(record: bytes) -> dict[str, np.ndarray]:
    if record[8:9] == b"{":
        return {
            name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
            for name, tensor in safetensors.deserialize(record)
        }
    arrays = ArrayUnpickler(io.BytesIO(record)).load()
    return {name: np.asarray(array) for name, array in arrays.items()}


def with_all_fields(arrays: dict[str, np.ndarray]) -> Batch:
    """The fields of a batch. Absent ones describe rows of one document, whose targets are the
    tokens after the inputs."""
    inputs = arrays["tokens"]
    segments = arrays.get("inputs_segmentation", np.ones_like(inputs))
    targets, target_segments = arrays.get("targets"), segments
    if targets is None:
        targets, following = (np.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (inputs, segments))
        target_segments = np.where(following == segments, segments, 0)
    positions = arrays.get("inputs_position")
    if positions is None:
        positions = segment_positions(segments)
    batch = {
        "inputs": inputs,
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets": targets,
        "targets_position": positions,
        "targets_segmentation": arrays.get("targets_segmentation", target_segments),
        "top_k_indices": arrays["top_k_indices"],
    }
    integers = {name: field.astype(np.int32) for name, field in batch.items()}
    return integers | {"top_k_logits": arrays["top_k_logits"].astype(np.float16)}


def segment_positions(segments: np.ndarray) -> np.ndarray:
    """Positions that count from 0 in each segment of a row."""
    index = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    is_start = np.diff(segments, axis=1, prepend=-1) != 0
    return index - np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
