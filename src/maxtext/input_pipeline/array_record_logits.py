"""Logits of a teacher in ArrayRecord files, as MaxText's save_top_k_teacher_logits writes them.

A record is a batch: `tokens` [B, T], `top_k_logits` and `top_k_indices` [B, T, K], and optionally
`inputs_position`, `inputs_segmentation`, `targets` and `targets_segmentation`, in the safetensors
format or, of earlier versions, pickled. Nothing but arrays is unpickled.
"""

import io
import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from maxtext.common.errors import UserError
from maxtext.input_pipeline.formats.array_record import open_reader
from maxtext.input_pipeline.interface import FIELDS, Batch

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
    targets, learned = arrays.get("targets"), segments
    if targets is None:
        targets, following = (np.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (inputs, segments))
        learned = np.where(following == segments, segments, 0)
    positions = arrays.get("inputs_position")
    if positions is None:
        positions = segment_positions(segments)
    batch = {
        "inputs": inputs,
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets": targets,
        "targets_position": positions,
        "targets_segmentation": arrays.get("targets_segmentation", learned),
        "top_k_indices": arrays["top_k_indices"],
    }
    integers = {name: field.astype(np.int32) for name, field in batch.items()}
    return integers | {"top_k_logits": arrays["top_k_logits"].astype(np.float16)}


def segment_positions(segments: np.ndarray) -> np.ndarray:
    """Positions that count from 0 in each segment of a row."""
    index = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    is_start = np.diff(segments, axis=1, prepend=-1) != 0
    return index - np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
