"""Writes folders of safetensors files one tensor at a time. A folder is complete or absent.

The shard of each tensor and its offset in it are planned from names, dtypes and shapes. So tensors
may come in any order; each is written at its offset and freed. They are written to a hidden folder
next to the result, `.NAME.partial-…`, which is renamed when all of it is on disk. A failure removes
it. If the process is killed, the next attempt removes it.
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

from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM, hf_asset_name
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
    """Write a folder of native weights: shards and their index, `texts` by file name (config.yml),
    and in hugging_face/ copies of the files that came with the model.
    """
    files = {f"hugging_face/{hf_asset_name(file)}": file for file in hf_assets}
    write_folder(out, weights, NATIVE_STEM, texts, files, shard_bytes, progress)


def write_hf_folder(
    out: str | os.PathLike,
    tensors: TensorStream,
    texts: Mapping[str, str],
    hf_assets: Sequence[Path],
    shard_bytes: int = 5 * GIGABYTE,
    progress: Progress | None = None,
) -> None:
    """Write a folder that Hugging Face's libraries load: model.safetensors, or shards with their
    index, `texts` by file name (config.json), and copies of `hf_assets`.
    """
    files = {hf_asset_name(file): file for file in hf_assets}
    write_folder(out, tensors, HF_STEM, texts, files, shard_bytes, progress)


def write_folder(
    out: str | os.PathLike,
    tensors: TensorStream,
    stem: str,
    texts: Mapping[str, str],
    files: Mapping[str, Path],
    shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    total_bytes = sum(tensor.nbytes for tensor in tensors.tensors.values())
    written_bytes = 0
    with atomic_folder(out, total_bytes) as folder:
        for name in {**files, **texts}:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            shutil.copyfile(file, folder / name)
        for name, text in texts.items():  # replaces a file of that name
            (folder / name).write_text(text, encoding="utf-8")
        writer = ShardWriter(folder, stem, plan_shards(tensors.tensors, shard_bytes))
        with writer:
            for name, array in tensors:
                writer.write(name, array)
                written_bytes += array.nbytes
                del array  # before the next one is read
                if progress:
                    progress(written_bytes, total_bytes, name)
        writer.write_index(total_bytes)


def plan_shards(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    """Consecutive tensors in each shard, as many as fit. A tensor larger than a shard gets its
    own.
    """
    shards: list[dict[str, TensorInfo]] = [{}]
    used_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and used_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
            used_bytes = 0
        shards[-1][name] = tensor
        used_bytes += tensor.nbytes
    return shards


@dataclass
class ShardWriter:
    """Writes tensors into their shards. A file is opened for its first tensor, and synced and
    closed after its last.
    """

    folder: Path
    stem: str
    shards: list[dict[str, TensorInfo]]
    open_files: dict[int, int] = field(default_factory=dict)  # file descriptors by shard

    def __post_init__(self) -> None:
        self.shard_of = {name: number for number, shard in enumerate(self.shards) for name in shard}
        self.offsets: dict[str, int] = {}
        self.missing = [set(shard) for shard in self.shards]

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, error_type: type | None, *rest: object) -> None:
        for descriptor in self.open_files.values():
            os.close(descriptor)
        missing = sorted(set().union(*self.missing))
        if error_type is None and missing:
            raise ValueError(
                f"{len(missing)} tensors were planned and never came, {missing[0]} among them"
            )

    def file_name(self, number: int) -> str:
        if len(self.shards) == 1 and self.stem != NATIVE_STEM:
            return f"{self.stem}.safetensors"
        return f"{self.stem}-{number + 1:05d}-of-{len(self.shards):05d}.safetensors"

    def write(self, name: str, array: np.ndarray) -> None:
        number = self.shard_of[name]
        tensor = self.shards[number][name]
        if (
            array.shape != tensor.shape
            or array.dtype != tensor.dtype
            or name not in self.missing[number]
        ):
            raise ValueError(f"{name} came as {array.dtype}{array.shape}, planned once as {tensor}")
        if number not in self.open_files:
            self.open_files[number] = self.create_file(number)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        write_at(self.open_files[number], self.offsets[name], data)
        self.missing[number].remove(name)
        if not self.missing[number]:
            descriptor = self.open_files.pop(number)
            os.fsync(descriptor)
            os.close(descriptor)

    def create_file(self, number: int) -> int:
        """Create a shard's file, write its header, and return its descriptor."""
        # Wide elements first, so that every tensor starts at a multiple of its element's size.
        ordered = sorted(self.shards[number].items(), key=lambda item: -item[1].dtype.itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in ordered:
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
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

    def write_index(self, total_bytes: int) -> None:
        """Written last, so that an index never exists without its shards."""
        if len(self.shards) == 1 and self.stem != NATIVE_STEM:
            return
        files = {name: self.file_name(number) for name, number in self.shard_of.items()}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (self.folder / f"{self.stem}.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n"
        )


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


@contextlib.contextmanager
def atomic_folder(out: str | os.PathLike, size: int = 0) -> Iterator[Path]:
    """A hidden folder that is renamed to `out` on success and removed on failure. `size` is the
    disk space that it needs, in bytes.
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
    """Lock a folder for as long as this process lives. Raises BlockingIOError if another process
    has locked it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_leftovers(target: Path) -> None:
    """Remove the hidden folders of killed attempts, which no process locks any more."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with contextlib.suppress(BlockingIOError):
            lock = lock_folder(path)
            try:
                shutil.rmtree(path)
            finally:
                os.close(lock)
            LOGGER.info("removed %s, left behind by an interrupted attempt", path)


def sync_all(folder: Path) -> None:
    """Sync all files and folders to disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(folder)
