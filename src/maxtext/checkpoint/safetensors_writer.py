"""Folders of safetensors files, written one tensor at a time; under its name a folder is complete
or absent.

Everything is planned from names, dtypes and shapes: which shard a tensor goes to, and where it lies
in it. Then the tensors may come in any order, each is written to its place and let go. The work
happens in a hidden folder beside the result, `.NAME.partial-…`, which takes the name when all of it
is on disk. A failure removes it; what a killed process leaves, the next attempt removes.
"""

import contextlib
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM
from maxtext.checkpoint.tensors import DTYPE_NAMES, Progress, TensorInfo, TensorStream
from maxtext.common.errors import UserError
from maxtext.common.files import current_umask, local_path, sync_directory
from maxtext.common.hardware import format_bytes
from maxtext.common.log import LOGGER

GIGABYTE = 10**9


def write_native_folder(
    out: str | os.PathLike,
    weights: TensorStream,
    texts: Mapping[str, str],
    hf_assets: Sequence[Path],
    shard_bytes: int = 2 * GIGABYTE,
    progress: Progress | None = None,
) -> None:
    """A folder of our weights, by layer: the shards and their index, texts by the name of their
    file (config.yml), and in hugging_face/ the files that came with the model from there."""
    files = {f"hugging_face/{file.name}": file for file in hf_assets}
    write_folder(out, weights, NATIVE_STEM, texts, files, shard_bytes, progress)


def write_hf_folder(
    out: str | os.PathLike,
    tensors: TensorStream,
    texts: Mapping[str, str],
    hf_assets: Sequence[Path],
    shard_bytes: int = 5 * GIGABYTE,
    progress: Progress | None = None,
) -> None:
    """A folder that Hugging Face's libraries load: model.safetensors or its shards with their
    index, texts by the name of their file (config.json), and files carried along."""
    write_folder(
        out, tensors, HF_STEM, texts, {file.name: file for file in hf_assets}, shard_bytes, progress
    )


def write_folder(
    out: str | os.PathLike,
    tensors: TensorStream,
    stem: str,
    texts: Mapping[str, str],
    files: Mapping[str, Path],
    shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    total = sum(tensor.nbytes for tensor in tensors.tensors.values())
    done = 0
    with atomic_folder(out, total) as folder:
        for name in {**files, **texts}:
            (folder / name).parent.mkdir(exist_ok=True)
        for name, file in files.items():
            shutil.copyfile(file, folder / name)
        for name, text in texts.items():  # in place of a file of that name
            (folder / name).write_text(text, encoding="utf-8")
        shards = Shards(folder, stem, plan(tensors.tensors, shard_bytes))
        with shards:
            for name, array in tensors:
                shards.put(name, array)
                done += array.nbytes
                del array  # or it would be kept while the next one is made
                if progress:
                    progress(done, total, name)
        shards.write_index(total)


def plan(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    """Consecutive tensors a shard, as many as fit; a tensor too large for any shard gets its
    own.
    """
    shards: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


@dataclass
class Shards:
    """Shards under way. A file is opened for its first tensor and closed, on disk, after its
    last.
    """

    folder: Path
    stem: str
    planned: list[dict[str, TensorInfo]]
    open: dict[int, int] = field(default_factory=dict)  # file descriptors by shard

    def __post_init__(self) -> None:
        self.shard_of = {
            name: number for number, shard in enumerate(self.planned) for name in shard
        }
        self.offsets: dict[str, int] = {}
        self.missing = [set(shard) for shard in self.planned]

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)
        missing = sorted(set().union(*self.missing))
        if kind is None and missing:
            raise ValueError(
                f"{len(missing)} tensors were planned and never came, {missing[0]} among them"
            )

    def file_name(self, number: int) -> str:
        if len(self.planned) == 1 and self.stem == HF_STEM:
            return f"{self.stem}.safetensors"
        return f"{self.stem}-{number + 1:05d}-of-{len(self.planned):05d}.safetensors"

    def put(self, name: str, array: np.ndarray) -> None:
        number = self.shard_of[name]
        tensor = self.planned[number][name]
        if (
            array.shape != tensor.shape
            or array.dtype != tensor.dtype
            or name not in self.missing[number]
        ):
            raise ValueError(f"{name} came as {array.dtype}{array.shape}, planned once as {tensor}")
        if number not in self.open:
            self.open[number] = self.begin(number)
        write_at(
            self.open[number],
            self.offsets[name],
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).data,
        )
        self.missing[number].remove(name)
        if not self.missing[number]:
            descriptor = self.open.pop(number)
            os.fsync(descriptor)
            os.close(descriptor)

    def begin(self, number: int) -> int:
        """A shard's file with its header."""
        # Wide elements first, so that every tensor starts at a multiple of its element's size.
        ordered = sorted(self.planned[number].items(), key=lambda item: -item[1].dtype.itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in ordered:
            kind = DTYPE_NAMES[tensor.dtype]
            header[name] = {
                "dtype": kind,
                "shape": tensor.shape,
                "data_offsets": (end, end + tensor.nbytes),
            }
            self.offsets[name] = end
            end += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for name, _ in ordered:
            self.offsets[name] += 8 + len(text)
        descriptor = os.open(
            self.folder / self.file_name(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666
        )
        write_at(descriptor, 0, memoryview(len(text).to_bytes(8, "little") + text))
        return descriptor

    def write_index(self, total: int) -> None:
        """Last, so that an index is never there without its shards."""
        if len(self.planned) == 1 and self.stem == HF_STEM:
            return
        files = {name: self.file_name(number) for name, number in self.shard_of.items()}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (self.folder / f"{self.stem}.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n"
        )


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


@contextlib.contextmanager
def atomic_folder(out: str | os.PathLike, size: int = 0) -> Iterator[Path]:
    """A hidden folder that becomes `out` on success and vanishes on failure; `size` is the room
    that it needs.
    """
    target = local_path(out).resolve()
    try:
        refuse_existing(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        free = shutil.disk_usage(target.parent).free
        if free < size:
            needed, left = format_bytes(size), format_bytes(free)
            if needed == left:
                needed, left = f"{size:,} bytes", f"{free:,}"
            raise UserError(f"{target} needs {needed}, and {target.parent} has only {left} free")
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.partial-"))
        lock = lock_folder(temporary)
        try:
            yield temporary
            sync_all(temporary)
            os.chmod(temporary, 0o777 & ~current_umask())
            refuse_existing(target)
            os.rename(temporary, target)
            sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}") from error


def refuse_existing(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists already: choose another name, or remove it")


def lock_folder(path: Path) -> int:
    """Hold a folder for as long as this process lives, or raise BlockingIOError where another one
    holds it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_leftovers(target: Path) -> None:
    """Remove what killed attempts at the same folder left behind: their locks died with them."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with contextlib.suppress(BlockingIOError):
            lock = lock_folder(path)
            try:
                shutil.rmtree(path)
            finally:
                os.close(lock)
            LOGGER.info("removed %s, left behind by an interrupted attempt", path)


def sync_all(folder: Path) -> None:
    """Put the small files and the folders on disk; shards were when they were closed."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    sync_directory(folder)
