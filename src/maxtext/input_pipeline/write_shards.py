"""Writes ranges of documents as files of tokens, in this process or in several.

A file is written under a temporary name and renamed when it is complete and on disk. A worker
process whose caller has ended ends with its next chunk.
"""

import contextlib
import os
import subprocess
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from maxtext.common.errors import UserError
from maxtext.common.files import sync_directory
from maxtext.input_pipeline.bad_records import BadRecords
from maxtext.input_pipeline.encode import Encoder
from maxtext.input_pipeline.formats import BadRecord, RecordSource, encode_example
from maxtext.input_pipeline.load_documents import LoadDocuments
from maxtext.input_pipeline.subprocesses import start_program
from maxtext.tokenizers.text_utils import num_cores

COLUMN = "tokens"
SUFFIX = ".array_record"
Worker = tuple[subprocess.Popen, Connection]
OPTIONS = "group_size:1"  # each record by itself, since training reads them in any order


@dataclass(frozen=True)
class Shard:
    """Documents from `first` up to `last`."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Counts:
    documents: int = 0
    records: int = 0
    tokens: int = 0
    bad: int = 0
    bytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@dataclass(frozen=True)
class ShardProgress:
    """Some documents of a shard were written. `finished` has the counts of a complete shard."""

    shard: Shard
    documents: int
    tokens: int
    bad: list[BadRecord]
    finished: Counts | None = None


@dataclass(frozen=True)
class Job:
    """The inputs that all shards share. `chunk` is the number of documents tokenized at once."""

    documents: RecordSource
    encoder: Encoder
    folder: str
    chunk: int


class CollectedBadRecords(BadRecords):
    """Bad records that are passed to the calling process, which counts them."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.errors: list[BadRecord] = []

    def add(self, errors: Sequence[BadRecord]) -> None:
        self.errors += errors


def temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def write_shard(job: Job, shard: Shard) -> Iterator[ShardProgress]:
    """Write a shard. Yields progress for each chunk of documents, and again when the shard is
    complete.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    path = Path(job.folder) / shard.name
    counts = Counts()
    with write_errors(path):
        writer = ArrayRecordWriter(str(temporary(path)), OPTIONS)
    for first in range(shard.first, shard.last, job.chunk):
        indices = range(first, min(first + job.chunk, shard.last))
        noted = CollectedBadRecords()
        documents = [
            tokens
            for tokens in LoadDocuments(job.documents, job.encoder, noted)(indices)
            if len(tokens)
        ]
        with write_errors(path):
            for tokens in documents:
                writer.write(encode_example({COLUMN: tokens}))
        step = ShardProgress(shard, len(indices), sum(map(len, documents)), noted.errors)
        counts += Counts(step.documents, len(documents), step.tokens, len(step.bad))
        yield step
    with write_errors(path):
        writer.close()
        size = commit_file(path)
    yield ShardProgress(shard, 0, 0, [], counts + Counts(bytes=size))


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise errors of writing a file as UserError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # the second is what the package array_record raises
        raise UserError(f"{path} cannot be written: {str(error).split(';')[0]}") from error


def commit_file(path: Path) -> int:
    """Sync the temporary file, rename it to `path`, and return its size."""
    with temporary(path).open("rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    os.replace(temporary(path), path)
    sync_directory(path.parent)
    return size


def write_shards(
    job: Job, shards: Sequence[Shard], workers: int, lock: int
) -> Generator[ShardProgress]:
    """Write all shards, `workers` at a time. After the generator is closed, no process writes any
    more. `lock` is a file descriptor that stays open in every process that may write.
    """
    if workers <= 1:
        for shard in shards:
            yield from write_shard(job, shard)
        return
    started: list[Worker] = []
    try:
        for _ in range(workers):
            # The library `tokenizers` would use all cores in each process.
            threads = {"RAYON_NUM_THREADS": str(max(num_cores() // workers, 1))}
            started.append(start_program(__name__, "serve", threads, (lock,)))
        yield from hand_out(job, shards, started)
    finally:
        for process, connection in started:
            connection.close()
            process.kill()
            process.wait()


def hand_out(
    job: Job, shards: Sequence[Shard], workers: Sequence[Worker]
) -> Iterator[ShardProgress]:
    waiting = iter(shards)
    processes: dict[Connection, subprocess.Popen] = {
        connection: process for process, connection in workers
    }
    for connection in processes:
        with contextlib.suppress(OSError):  # a process that has ended is detected below
            connection.send(job)
        give(connection, waiting)
    busy = set(processes)
    while busy:
        ready: Any = wait(list(busy))
        for connection in ready:
            try:
                step = connection.recv()
            except (EOFError, OSError) as error:
                code = processes[connection].wait()
                raise UserError(
                    f"a worker process ended (exit code {code}), perhaps for lack of memory: look "
                    "at its output above, and continue with fewer --workers"
                ) from error
            if isinstance(step, BaseException):
                raise step
            if step.finished is not None and not give(connection, waiting):
                busy.discard(connection)
            yield step


def give(connection: Connection, waiting: Iterator[Shard]) -> bool:
    """Send the next shard to a worker. Returns False if there is none."""
    shard = next(waiting, None)
    if shard is not None:
        with contextlib.suppress(OSError):
            connection.send(shard)
    return shard is not None


def serve(descriptor: int) -> None:
    """The main loop of a worker process."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        job = connection.recv()
        while True:
            shard = connection.recv()
            try:
                for step in write_shard(job, shard):
                    connection.send(step)
            except UserError as error:
                connection.send(error)
    os._exit(0)
