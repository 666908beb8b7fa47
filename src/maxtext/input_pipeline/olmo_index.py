"""The index of a pre-tokenized corpus: its shards, in order, and how they are split into instances.

It is a JSON file in the format (version "1") that MaxText's tools write for OLMo's data:
  format_version, sequence_length, dtype, tokenizer, total_instances, total_tokens, fingerprint, and
  files: a list of {path, label, n_tokens, n_instances, instance_offset}.
Only format_version, sequence_length, dtype and each file's path and n_tokens are required. The
counts follow from them, and a count that is given must agree. tokenizer and label are notes.

A shard is a flat array of token ids: raw integers without a header, as OLMo publishes them under
the name .npy, or a real .npy file; its first bytes tell which. An instance is sequence_length
consecutive tokens of one shard. The first starts at the shard's first token and each other where
the last ended, regardless of documents. The remaining tokens at the end of a shard are not used.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import write_text
from maxtext.common.log import LOGGER
from maxtext.common.types import Json

VERSION = "1"
MAX_LISTED = 5  # shards that an error lists
HEADER_THREADS = 16  # for shards on a network file system


@dataclass(frozen=True)
class Shard:
    path: str
    tokens: int
    label: str = ""


@dataclass(frozen=True)
class Index:
    sequence_length: int
    dtype: str
    shards: tuple[Shard, ...]
    tokenizer: str = ""

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first instance of each shard, followed by the number of all instances."""
        return tuple(
            accumulate((shard.tokens // self.sequence_length for shard in self.shards), initial=0)
        )

    @property
    def instances(self) -> int:
        return self.starts[-1]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def locate(self, instance: int) -> tuple[int, int]:
        """(number of the shard of an instance, index of the instance's first token in it)."""
        shard = bisect_right(self.starts, instance) - 1
        return shard, (instance - self.starts[shard]) * self.sequence_length

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines the tokens of an instance, as the format defines
        it.
        """
        parts = [VERSION, self.sequence_length, self.dtype, self.tokenizer]
        parts += [part for shard in self.shards for part in (shard.path, shard.tokens)]
        return (
            "sha256:" + hashlib.sha256("".join(f"{part}\0" for part in parts).encode()).hexdigest()
        )

    def as_json(self) -> Json:
        return {
            "format_version": VERSION,
            "sequence_length": self.sequence_length,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer,
            "total_instances": self.instances,
            "total_tokens": self.tokens,
            "fingerprint": self.fingerprint,
            "files": [
                {
                    "path": shard.path,
                    "label": shard.label,
                    "n_tokens": shard.tokens,
                    "n_instances": shard.tokens // self.sequence_length,
                    "instance_offset": start,
                }
                for shard, start in zip(self.shards, self.starts, strict=False)
            ],
        }


def read_index(path: str) -> Index:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ConfigError(f"olmo_index_path={path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"olmo_index_path={path} is not a JSON file: {error}") from None
    return from_json(content, f"olmo_index_path={path}")


def from_json(content: Any, where: str) -> Index:
    version = entry(content, "format_version", str, where)
    if version != VERSION:
        raise ConfigError(
            f"{where} has format_version {version!r}, and this version reads {VERSION!r}: make it "
            "again"
        )
    files = entry(content, "files", list, where)
    index = Index(
        sequence_length=entry(content, "sequence_length", int, where),
        dtype=entry(content, "dtype", str, where),
        shards=tuple(
            Shard(
                entry(file, "path", str, at),
                entry(file, "n_tokens", int, at),
                str(file.get("label", "")),
            )
            for file, at in (
                (file, f"{where}, files[{number}]") for number, file in enumerate(files)
            )
        ),
        tokenizer=str(content.get("tokenizer", "")),
    )
    check_numbers(index, where)
    stated, expected = content, index.as_json()
    wrong = [
        name
        for name in ("total_instances", "total_tokens")
        if stated.get(name, expected[name]) != expected[name]
    ]
    for number, (file, expected_file) in enumerate(zip(files, expected["files"], strict=True)):
        names = ("n_instances", "instance_offset")
        wrong += [
            f"files[{number}].{name}"
            for name in names
            if file.get(name, expected_file[name]) != expected_file[name]
        ]
    if wrong:
        raise ConfigError(
            f"{where}: {join_some(wrong, ', ')} do not follow from sequence_length and n_tokens: "
            "make it again"
        )
    return index


def entry(content: object, name: str, kind: type, where: str) -> Any:
    if not isinstance(content, dict):
        raise ConfigError(f"{where} is not a JSON object of names and values: make it again")
    if not isinstance(content.get(name), kind) or isinstance(content[name], bool):
        problem = f"has {name}={content[name]!r}" if name in content else f"has no {name}"
        raise ConfigError(
            f"{where} {problem}, and needs one of type {kind.__name__}: make it again"
        )
    return content[name]


def check_numbers(index: Index, where: str) -> None:
    if index.sequence_length < 2:
        raise ConfigError(
            f"{where}: sequence_length={index.sequence_length}, but a target needs two tokens or "
            "more"
        )
    if not is_token_type(index.dtype):
        raise ConfigError(
            f"{where}: dtype={index.dtype!r} is not an integer type: use uint16 or uint32"
        )
    if not index.shards:
        raise ConfigError(f"{where} names no files")
    if negative := [shard.path for shard in index.shards if shard.tokens < 0]:
        raise ConfigError(f"{where}: n_tokens is negative for {join_some(negative, ', ')}")


def is_token_type(name: str) -> bool:
    try:
        return np.dtype(name).kind in "iu"
    except TypeError:
        return False


def remap_paths(index: Index, before: str, after: str) -> Index:
    """The index with the prefix `before` of paths replaced by `after`."""
    if not before:
        return index
    if not any(shard.path.startswith(before) for shard in index.shards):
        raise ConfigError(
            f"olmo_path_remap_from={before}: no path of the index starts so, the first is "
            f"{index.shards[0].path}"
        )
    after = os.path.expanduser(after)
    shards = (
        replace(shard, path=after + shard.path[len(before) :])
        if shard.path.startswith(before)
        else shard
        for shard in index.shards
    )
    return replace(index, shards=tuple(shards))


@dataclass(frozen=True)
class ShardHeader:
    """The contents of a shard's file. `offset` is the number of bytes before its first token."""

    dtype: str
    tokens: int
    offset: int


class BadShard(Exception):
    """A shard that cannot be used. The message follows the path of the shard."""


def read_shard_header(path: str, raw_dtype: str) -> ShardHeader:
    """Read the header of a shard. `raw_dtype` is the dtype of tokens if the file has none."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(np.lib.format.MAGIC_PREFIX))
        if start == np.lib.format.MAGIC_PREFIX:
            array = np.lib.format.open_memmap(path, mode="r")
            if array.ndim != 1:
                raise BadShard(
                    f"has the shape {array.shape}, and a shard is one flat array of tokens"
                )
            return ShardHeader(str(array.dtype), array.size, array.offset)
        size = os.path.getsize(path)
    except FileNotFoundError:
        raise BadShard("does not exist") from None
    except OSError as error:
        raise BadShard(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # NumPy: a damaged header, or fewer bytes than it says
        raise BadShard(f"is a broken .npy file: {error}") from None
    tokens, rest = divmod(size, np.dtype(raw_dtype).itemsize)
    if rest:
        raise BadShard(f"has {size} bytes, which is not a multiple of the size of {raw_dtype}")
    return ShardHeader(raw_dtype, tokens, 0)


def read_shard_headers(paths: Sequence[str], raw_dtype: str) -> list[ShardHeader | BadShard]:
    def attempt(path: str) -> ShardHeader | BadShard:
        try:
            return read_shard_header(path, raw_dtype)
        except BadShard as problem:
            return problem

    with ThreadPoolExecutor(HEADER_THREADS) as threads:
        return list(threads.map(attempt, paths))


@lru_cache(maxsize=2)  # one process may open many streams of one index
def token_offsets(index: Index) -> tuple[int, ...]:
    """The byte offset of the first token of each shard. Raises ConfigError if a shard is not as the
    index says.
    """
    problems, offsets = [], []
    for shard, header in zip(
        index.shards,
        read_shard_headers([shard.path for shard in index.shards], index.dtype),
        strict=True,
    ):
        if isinstance(header, BadShard):
            problems.append(f"{shard.path} {header}")
        elif np.dtype(header.dtype) != np.dtype(index.dtype):
            problems.append(f"{shard.path} holds {header.dtype}, but the index says {index.dtype}")
        elif header.tokens != shard.tokens:
            problems.append(
                f"{shard.path} holds {header.tokens} tokens, but the index says {shard.tokens}"
            )
        else:
            offsets.append(header.offset)
    if problems:
        raise ConfigError(
            *first_few(problems),
            f"olmo_index_path: {len(problems)} of {len(index.shards)} shards are not as the index "
            "says: make the index again, or set olmo_path_remap_from and olmo_path_remap_to if the "
            "shards were moved",
        )
    unused = index.tokens - index.instances * index.sequence_length
    LOGGER.info(
        "%d instances of %d tokens in %d shards; %d tokens at the ends of shards fill no instance "
        "and are not used",
        index.instances,
        index.sequence_length,
        len(index.shards),
        unused,
    )
    return tuple(offsets)


def write_index(
    out_path: str | os.PathLike,
    paths: Sequence[str],
    sequence_length: int,
    dtype: str = "uint32",
    tokenizer: str = "",
    labels: Sequence[str] | None = None,
) -> Index:
    """Write the index of these shards in this order, and return it. `dtype` is that of shards
    without a header. `tokenizer` and `labels` (one for each path) are notes.
    """
    if not is_token_type(dtype):
        raise UserError(f"dtype={dtype!r} is not an integer type: use uint16 or uint32")
    paths = [os.path.abspath(os.path.expanduser(path)) for path in paths]
    layouts, problems = [], []
    for path, header in zip(paths, read_shard_headers(paths, dtype), strict=True):
        if isinstance(header, BadShard):
            problems.append(f"{path} {header}")
        else:
            layouts.append(header)
    if problems:
        raise UserError("\n".join(first_few(problems)))
    types = sorted({layout.dtype for layout in layouts})
    if len(types) > 1:
        raise UserError(
            f"the shards hold tokens of different types, {' and '.join(types)}: make one index for "
            "each"
        )
    notes = labels if labels is not None else [""] * len(paths)
    shards = (
        Shard(path, layout.tokens, note)
        for path, layout, note in zip(paths, layouts, notes, strict=True)
    )
    index = Index(sequence_length, types[0] if types else dtype, tuple(shards), tokenizer)
    check_numbers(index, "the new index")
    write_text(out_path, json.dumps(index.as_json(), indent=2) + "\n")
    return index


def first_few(problems: list[str]) -> list[str]:
    more = len(problems) - MAX_LISTED
    return [*problems[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]


def join_some(names: list[str], between: str) -> str:
    return between.join(first_few(names))
