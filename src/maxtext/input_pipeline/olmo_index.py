"""The index of a pre-tokenized corpus: which shards it has, in which order, and how they are cut
into instances.

It is a JSON file of the format (version "1") that MaxText's tools write for OLMo's data:
  format_version, sequence_length, dtype, tokenizer, total_instances, total_tokens, fingerprint, and
  files: a list of {path, label, n_tokens, n_instances, instance_offset}.
Only format_version, sequence_length, dtype and each file's path and n_tokens are needed; the counts
follow from them, and a count that is given must agree. tokenizer and label are notes for people.

A shard is a flat row of token ids: raw numbers without a header, as OLMo publishes them under the
name .npy, or a real .npy file; its first bytes tell which. An instance is sequence_length tokens
that follow each other in one shard. The first starts at the shard's first token and each other
where the last ended, whatever documents that cuts through; the tokens left at the end of a shard
are not used.
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

VERSION = "1"
NAMED_PROBLEMS = 5  # shards that an error names; a wrong folder would name them all
LOOKING_THREADS = 16  # for shards on a network


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
        """The number of the first instance of each shard, and after the last the number of all
        instances.
        """
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
        """The number of the shard that holds an instance, and the place of the instance's first
        token in it.
        """
        shard = bisect_right(self.starts, instance) - 1
        return shard, (instance - self.starts[shard]) * self.sequence_length

    @cached_property
    def fingerprint(self) -> str:
        """Changes with all that decides which tokens an instance has, as the format defines it."""
        words = [VERSION, self.sequence_length, self.dtype, self.tokenizer]
        words += [word for shard in self.shards for word in (shard.path, shard.tokens)]
        return (
            "sha256:" + hashlib.sha256("".join(f"{word}\0" for word in words).encode()).hexdigest()
        )

    def as_json(self) -> dict[str, Any]:
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
            f"{where} has format_version {version!r}, and this version reads {VERSION!r}: make it again"
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
    said, meant = content, index.as_json()
    wrong = [
        name
        for name in ("total_instances", "total_tokens")
        if said.get(name, meant[name]) != meant[name]
    ]
    for number, (file, ours) in enumerate(zip(files, meant["files"], strict=True)):
        names = ("n_instances", "instance_offset")
        wrong += [
            f"files[{number}].{name}" for name in names if file.get(name, ours[name]) != ours[name]
        ]
    if wrong:
        raise ConfigError(
            f"{where}: {some(wrong, ', ')} do not follow from sequence_length and n_tokens: make it again"
        )
    return index


def entry(content: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(content, dict):
        raise ConfigError(f"{where} is not a JSON object of names and values: make it again")
    if not isinstance(content.get(name), kind) or isinstance(content[name], bool):
        found = f"has {name}={content[name]!r}" if name in content else f"has no {name}"
        raise ConfigError(f"{where} {found}, and needs one of type {kind.__name__}: make it again")
    return content[name]


def check_numbers(index: Index, where: str) -> None:
    if index.sequence_length < 2:
        raise ConfigError(
            f"{where}: sequence_length={index.sequence_length}, but a target needs two tokens or more"
        )
    if not is_token_type(index.dtype):
        raise ConfigError(
            f"{where}: dtype={index.dtype!r} is no type of integers: use uint16 or uint32"
        )
    if not index.shards:
        raise ConfigError(f"{where} names no files")
    if negative := [shard.path for shard in index.shards if shard.tokens < 0]:
        raise ConfigError(f"{where}: n_tokens is negative for {some(negative, ', ')}")


def is_token_type(name: str) -> bool:
    try:
        return np.dtype(name).kind in "iu"
    except TypeError:
        return False


def remap_paths(index: Index, before: str, after: str) -> Index:
    """The same index with `after` in place of `before` at the start of every path that starts
    so.
    """
    if not before:
        return index
    if not any(shard.path.startswith(before) for shard in index.shards):
        raise ConfigError(
            f"olmo_path_remap_from={before}: no path of the index starts so, the first is {index.shards[0].path}"
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
    """What a shard's file holds. `offset`: the bytes before its first token."""

    dtype: str
    tokens: int
    offset: int


class BadShard(Exception):
    """What is wrong with one shard, as the rest of a sentence about it."""


def look(path: str, raw_dtype: str) -> ShardHeader:
    """`raw_dtype`: the type of tokens if the file has no header that says it."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(np.lib.format.MAGIC_PREFIX))
        if start == np.lib.format.MAGIC_PREFIX:
            array = np.lib.format.open_memmap(path, mode="r")
            if array.ndim != 1:
                raise BadShard(
                    f"has the shape {array.shape}, and a shard is one flat row of tokens"
                )
            return ShardHeader(str(array.dtype), array.size, array.offset)
        size = os.path.getsize(path)
    except FileNotFoundError:
        raise BadShard("does not exist") from None
    except OSError as error:
        raise BadShard(f"cannot be read: {error.strerror}") from None
    except (
        ValueError
    ) as error:  # of numpy: a header that it cannot read, or fewer bytes than the header says
        raise BadShard(f"is a broken .npy file: {error}") from None
    tokens, rest = divmod(size, np.dtype(raw_dtype).itemsize)
    if rest:
        raise BadShard(f"has {size} bytes, which is no whole number of {raw_dtype} tokens")
    return ShardHeader(raw_dtype, tokens, 0)


def look_at_all(paths: Sequence[str], raw_dtype: str) -> list[ShardHeader | BadShard]:
    def attempt(path: str) -> ShardHeader | BadShard:
        try:
            return look(path, raw_dtype)
        except BadShard as problem:
            return problem

    with ThreadPoolExecutor(LOOKING_THREADS) as threads:
        return list(threads.map(attempt, paths))


@lru_cache(maxsize=2)  # one process may open many streams of one index
def token_offsets(index: Index) -> tuple[int, ...]:
    """The bytes before the first token of each shard, once every shard is found to be what the
    index says.
    """
    problems, offsets = [], []
    for shard, found in zip(
        index.shards, look_at_all([shard.path for shard in index.shards], index.dtype), strict=True
    ):
        if isinstance(found, BadShard):
            problems.append(f"{shard.path} {found}")
        elif np.dtype(found.dtype) != np.dtype(index.dtype):
            problems.append(f"{shard.path} holds {found.dtype}, but the index says {index.dtype}")
        elif found.tokens != shard.tokens:
            problems.append(
                f"{shard.path} holds {found.tokens} tokens, but the index says {shard.tokens}"
            )
        else:
            offsets.append(found.offset)
    if problems:
        raise ConfigError(
            *first_few(problems),
            f"olmo_index_path: {len(problems)} of {len(index.shards)} shards are not as the index says: make the index "
            "again, or set olmo_path_remap_from and olmo_path_remap_to if the shards were moved",
        )
    unused = index.tokens - index.instances * index.sequence_length
    LOGGER.info(
        "%d instances of %d tokens in %d shards; %d tokens at the ends of shards fill no instance and are not used",
        index.instances, index.sequence_length, len(index.shards), unused,
    )  # fmt: skip
    return tuple(offsets)


def write_index(
    out_path: str | os.PathLike,
    paths: Sequence[str],
    sequence_length: int,
    dtype: str = "uint32",
    tokenizer: str = "",
    labels: Sequence[str] | None = None,
) -> Index:
    """Write the index of these shards in this order, and return it. `dtype`: of shards without a
    header, which do not say it; `tokenizer` and `labels` (one a path) are notes."""
    if not is_token_type(dtype):
        raise UserError(f"dtype={dtype!r} is no type of integers: use uint16 or uint32")
    paths = [os.path.abspath(os.path.expanduser(path)) for path in paths]
    layouts, problems = [], []
    for path, found in zip(paths, look_at_all(paths, dtype), strict=True):
        if isinstance(found, BadShard):
            problems.append(f"{path} {found}")
        else:
            layouts.append(found)
    if problems:
        raise UserError("\n".join(first_few(problems)))
    types = sorted({layout.dtype for layout in layouts})
    if len(types) > 1:
        raise UserError(
            f"the shards hold tokens of different types, {' and '.join(types)}: make one index for each"
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
    more = len(problems) - NAMED_PROBLEMS
    return [*problems[:NAMED_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]


def some(names: list[str], between: str) -> str:
    return between.join(first_few(names))
