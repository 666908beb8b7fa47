"""Folders of safetensors files, read one tensor at a time.

All headers are parsed and checked before any data is read. Data is read without a memory map, so
that memory holds one tensor at a time. A safetensors file is eight bytes (the length of the header,
little-endian), the header in JSON, and the data of all tensors without gaps.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxtext.checkpoint.tensors import DTYPES, TensorInfo
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import read_json_object
from maxtext.common.hub import CHAT_TEMPLATES_DIR
from maxtext.common.types import Json

# The stems of file names in Hugging Face folders and in native folders
HF_STEM, NATIVE_STEM = "model", "weights"
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_SUFFIXES = (
    *PICKLE_SUFFIXES,
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
    """The tensors of a folder, read on demand. `locations` say where each is stored."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    locations: Mapping[str, Location]

    @classmethod
    def open(cls, path: str | os.PathLike, stem: str = HF_STEM) -> "SafetensorsFolder":
        """Read the headers of all files and check them. Raises UserError if one is damaged."""
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        single, index = path / f"{stem}.safetensors", path / f"{stem}.safetensors.index.json"
        if single.is_file():
            entries = read_header(single)
        elif index.is_file():
            entries = read_index(index)
        else:
            raise UserError(explain_missing_weights(path, stem))
        return cls(
            path,
            {name: tensor for name, (tensor, _) in entries.items()},
            {name: location for name, (_, location) in entries.items()},
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


Entries = dict[str, tuple[TensorInfo, Location]]


def read_index(index: Path) -> Entries:
    """The tensors of all files that an index lists."""
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(
            f"{index}: weight_map must be an object of tensors and their files: download it again"
        )
    names_by_file: dict[str, list[str]] = {}
    for name, file in files.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: weight_map names no .safetensors file for {name}, but {file!r}"
            )
        names_by_file.setdefault(file, []).append(name)
    entries: Entries = {}
    for file, names in names_by_file.items():
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
        # Tensors that the index does not list are included, so that none is dropped in silence.
        entries |= {name: entry for name, entry in header.items() if files.get(name, file) == file}
    return entries


def read_header(path: Path) -> Entries:
    """The tensors of one file. Raises UserError if its size is not what the header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if start == b"version ":
        raise UserError(
            f"{path} is a pointer of git-lfs, not the weights themselves: run `git lfs pull` in "
            "its folder"
        )
    if len(start) < 8 or text[:1] != b"{":
        raise UserError(f"{path} is not a safetensors file ({size} bytes): download it again")
    if len(text) < length:
        raise UserError(f"{path} is truncated: it ends within its header; download it again")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ordered = sorted(
            ((name, entry["dtype"], *parse_entry(entry)) for name, entry in header.items()),
            key=lambda entry: entry[3:],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a safetensors file: its header is damaged ({error})"
        ) from error
    entries: Entries = {}
    end = 0
    for name, dtype, shape, first, last in ordered:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UserError(
                f"{path}: {name} has dtype {dtype}, which is not supported: use {', '.join(DTYPES)}"
            )
        tensor = TensorInfo(DTYPES[dtype], shape)
        if first != end or last - first != tensor.nbytes:
            raise UserError(
                f"{path} is damaged: its header gives {name} bytes {first} to {last} for "
                f"{dtype}{list(shape)}"
            )
        entries[name] = (tensor, Location(path, 8 + length + first))
        end = last
        if size < 8 + length + end:
            expected_size = 8 + length + ordered[-1][4]
            raise UserError(
                f"{path} is truncated: {size} of {expected_size} bytes, {name} is not complete; "
                "download it again"
            )
    if size != 8 + length + end:
        raise UserError(
            f"{path} is damaged: {size - 8 - length - end} bytes follow its last tensor"
        )
    return entries


def parse_entry(entry: Json) -> tuple[tuple[int, ...], int, int]:
    """Shape, first byte and end byte of a header entry. Raises ValueError if they are not sizes."""
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"sizes {list(shape)} and bytes {entry['data_offsets']}")
    return shape, first, last


def explain_missing_weights(path: Path, stem: str) -> str:
    """Why a folder has no weights of this stem."""
    names = sorted(file.name for file in path.iterdir())
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    other_stem, contents = {
        NATIVE_STEM: (
            HF_STEM,
            "weights in Hugging Face's format, not maxtext's: convert them first",
        ),
    }.get(stem, (NATIVE_STEM, "weights in maxtext's own format, not Hugging Face's"))
    if {f"{other_stem}.safetensors", f"{other_stem}.safetensors.index.json"} & set(names):
        return f"{path} holds {contents}"
    broken = [name for name in (single, index) if name in names]
    if broken:
        return (
            f"{path / broken[0]} is not a file, or a link to a file that is gone: download it again"
        )
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"{path} has {shards[0]} but neither {single} nor {index}"
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{path} has only {pickles[0]}: pickle files are never loaded, convert to safetensors "
            "first"
        )
    return f"{path} has no weights: neither {single} nor {index}"


def find_hf_assets(path: str | os.PathLike) -> list[Path]:
    """The files of a model folder other than weights and code: its configuration, its tokenizer
    with its chat templates.
    """
    folder = Path(path)
    files = (
        file
        for file in sorted([*folder.iterdir(), *folder.glob(f"{CHAT_TEMPLATES_DIR}/*.jinja")])
        if file.is_file() and not file.name.startswith(".")
    )
    return [file for file in files if not file.name.endswith((*WEIGHT_SUFFIXES, ".py"))]


def hf_asset_name(file: Path) -> str:
    """The path of one of `find_hf_assets` within its model folder."""
    in_folder = file.parent.name == CHAT_TEMPLATES_DIR
    return f"{CHAT_TEMPLATES_DIR}/{file.name}" if in_folder else file.name
