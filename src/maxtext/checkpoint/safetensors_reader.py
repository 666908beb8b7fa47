"""Folders of safetensors files, read one tensor at a time.

Headers are parsed here and data is read without a memory map: whatever is wrong with a file is
found before any data is read, and memory holds the tensor that was asked for and no more. A
safetensors file is eight bytes (the length of the header, little-endian), the header in JSON, and
the data of all tensors without gaps.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.checkpoint.tensors import DTYPES, TensorInfo
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import read_json_object

HF_STEM, NATIVE_STEM = (
    "model",
    "weights",
)  # the stems of file names in Hugging Face's folders and in ours
LONGEST_HEADER = 100_000_000  # the format's own limit
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_FILES = (
    *PICKLES,
    ".safetensors",
    ".safetensors.index.json",
    ".bin.index.json",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)


@dataclass(frozen=True)
class Location:
    file: Path
    offset: int


@dataclass(frozen=True)
class SafetensorsFolder:
    """The tensors of a folder: what they are, where they lie, and their values on demand."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    locations: Mapping[str, Location]

    @classmethod
    def open(cls, path: str | os.PathLike, stem: str = HF_STEM) -> "SafetensorsFolder":
        """Read the headers of all files and check them."""
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        single, index = path / f"{stem}.safetensors", path / f"{stem}.safetensors.index.json"
        if single.is_file():
            found = read_header(single)
        elif index.is_file():
            found = read_index(index)
        else:
            raise UserError(no_weights(path, stem))
        return cls(
            path,
            {name: tensor for name, (tensor, _) in found.items()},
            {name: location for name, (_, location) in found.items()},
        )

    @property
    def title(self) -> str:
        return str(self.path)

    def read(self, name: str) -> np.ndarray:
        tensor, location = self.tensors[name], self.locations[name]
        try:
            data = np.fromfile(location.file, np.uint8, tensor.nbytes, offset=location.offset)
        except OSError as error:
            raise UserError(f"{location.file} cannot be read: {error.strerror or error}") from error
        if data.size != tensor.nbytes:
            raise UserError(
                f"{location.file} became shorter while it was read: {name} is not complete"
            )
        return data.view(tensor.dtype).reshape(tensor.shape)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


Found = dict[str, tuple[TensorInfo, Location]]


def read_index(index: Path) -> Found:
    """The tensors of all files that an index names."""
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(
            f"{index}: weight_map must be an object of tensors and their files: download it again"
        )
    by_file: dict[str, list[str]] = {}
    for name, file in files.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: weight_map names no .safetensors file for {name}, but {file!r}"
            )
        by_file.setdefault(file, []).append(name)
    found: Found = {}
    for file, names in by_file.items():
        path = index.parent / file
        if Path(file).name != file:
            raise ConfigError(f"{index} names {file!r}, which is not a file of its folder")
        if not path.is_file():
            raise UserError(
                f"{path} is missing: {index.name} expects {names[0]} in it; download it again"
            )
        header = read_header(path)
        for name in names:
            if name not in header:
                raise UserError(
                    f"{path} lacks {name}, which {index.name} expects in it; download both again"
                )
        # A tensor that the index does not know is shown all the same, so that it is not dropped in
        # silence.
        found |= {name: value for name, value in header.items() if files.get(name, file) == file}
    return found


def read_header(path: Path) -> Found:
    """The tensors of one file, whose size must be exactly what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if length <= LONGEST_HEADER else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if start == b"version ":
        raise UserError(
            f"{path} is a pointer of git-lfs, not the weights themselves: run `git lfs pull` in its folder"
        )
    if len(start) < 8 or text[:1] != b"{":
        raise UserError(f"{path} is not a safetensors file ({size} bytes): download it again")
    if len(text) < length:
        raise UserError(f"{path} is truncated: it ends within its header; download it again")
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        ordered = sorted(
            ((name, entry["dtype"], *spans(entry)) for name, entry in entries.items()),
            key=lambda e: e[3:],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a safetensors file: its header is damaged ({error})"
        ) from error
    found: Found = {}
    end = 0
    for name, kind, shape, first, last in ordered:
        if not isinstance(kind, str) or kind not in DTYPES:
            raise UserError(
                f"{path}: {name} has dtype {kind}, which is not supported: use {', '.join(DTYPES)}"
            )
        tensor = TensorInfo(DTYPES[kind], shape)
        if first != end or last - first != tensor.nbytes:
            raise UserError(
                f"{path} is damaged: its header gives {name} bytes {first} to {last} for {kind}{list(shape)}"
            )
        found[name] = (tensor, Location(path, 8 + length + first))
        end = last
        if size < 8 + length + end:
            whole = 8 + length + ordered[-1][4]
            raise UserError(
                f"{path} is truncated: {size} of {whole} bytes, {name} is not complete; download it again"
            )
    if size != 8 + length + end:
        raise UserError(
            f"{path} is damaged: {size - 8 - length - end} bytes follow its last tensor"
        )
    return found


def spans(entry: dict[str, Any]) -> tuple[tuple[int, ...], int, int]:
    """Shape, first byte and last byte of an entry of a header."""
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"sizes {list(shape)} and bytes {entry['data_offsets']}")
    return shape, first, last


def no_weights(path: Path, stem: str) -> str:
    """Why a folder cannot be opened."""
    names = sorted(file.name for file in path.iterdir())
    other, meaning = {
        HF_STEM: (NATIVE_STEM, "weights in maxtext's own form, not those of Hugging Face"),
        NATIVE_STEM: (
            HF_STEM,
            "weights in Hugging Face's form, not in maxtext's: convert them first",
        ),
    }[stem]
    if {f"{other}.safetensors", f"{other}.safetensors.index.json"} & set(names):
        return f"{path} holds {meaning}"
    broken = [
        name for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json") if name in names
    ]
    if broken:
        return (
            f"{path / broken[0]} is not a file, or a link to a file that is gone: download it again"
        )
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"{path} has {shards[0]} but neither {stem}.safetensors nor {stem}.safetensors.index.json"
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return f"{path} has only {pickles[0]}: pickle files are never loaded, convert to safetensors first"
    return f"{path} has no weights: neither {stem}.safetensors nor {stem}.safetensors.index.json"


def find_hf_assets(path: str | os.PathLike) -> list[Path]:
    """The files beside the weights that describe a model: its configuration, its tokenizer. Code is
    not among them.
    """
    files = (
        file
        for file in sorted(Path(path).iterdir())
        if file.is_file() and not file.name.startswith(".")
    )
    return [file for file in files if not file.name.endswith((*WEIGHT_FILES, ".py"))]
