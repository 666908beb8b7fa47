"""The two files of a batch job: requests, read one line at a time, and results, appended one
complete line at a time.

A result carries the index of its line and a checksum of that line and of the settings that decide
results. So a job that was stopped, in any way, knows from its results what is left, and a job whose
requests or settings have changed is refused before it mixes results that do not belong together.
"""

import array
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext.common.errors import ConfigError, UserError

HALF_BITS = 32  # of a checksum: the upper half is the line's, the lower half that of the settings


@dataclass(frozen=True)
class Line:
    index: int
    data: bytes


def read_lines(path: Path) -> Iterator[Line]:
    """The lines that are not blank, with their index in the file, from 0."""
    try:
        with path.open("rb") as file:
            for index, data in enumerate(file):
                if data.strip():
                    yield Line(index, data)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def half_checksum(data: bytes) -> int:
    """Never 0, which stands for no result."""
    digest = hashlib.blake2b(data.strip(), digest_size=HALF_BITS // 8).digest()
    return int.from_bytes(digest, "big") or 1


class ResultFile:
    """The file of results, of which this process is the only writer. `settings`: all that decides
    the results.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool):
        self.path = path
        self.settings = half_checksum(json.dumps(settings, sort_keys=True, default=str).encode())
        self.checksums = array.array("Q")  # by the index of the line; 0 where there is no result
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise not_regular(path)
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
        if not stat.S_ISREG(os.fstat(self.handle).st_mode):
            os.close(self.handle)
            raise not_regular(path)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.handle)
            raise UserError(
                f"another `maxtext batch` is writing {path}: wait for it, or name another file"
            ) from error
        try:
            self.num_valid_bytes = 0 if overwrite else self.read()
        except BaseException:
            self.close()
            raise

    def read(self) -> int:
        """Read the results of earlier runs; returns the bytes of complete lines, since the last
        line may be torn.
        """
        num_bytes = 0
        with self.path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    break
                try:
                    record = json.loads(data)
                    index, checksum = int(record["index"]), int(record["check"], 16)
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise ConfigError(
                        f"line {number} of {self.path} is no result of `maxtext batch`: "
                        "name another file, or replace this one with --overwrite"
                    ) from error
                if checksum & ((1 << HALF_BITS) - 1) != self.settings:
                    raise ConfigError(
                        f"{self.path} has results of another model or of other settings of prompts"
                        " and sampling: run with those, name another file, or start over with"
                        " --overwrite"
                    )
                self.record(index, checksum)
                num_bytes += len(data)
        return num_bytes

    def record(self, index: int, checksum: int) -> None:
        if index >= len(self.checksums):
            self.checksums.frombytes(bytes(8 * (index + 1 - len(self.checksums))))
        self.checksums[index] = checksum

    def has(self, line: Line) -> bool:
        """Whether a line has a result. Raises ConfigError if the line has changed since."""
        checksum = self.checksums[line.index] if line.index < len(self.checksums) else 0
        if checksum and checksum != self.checksum(line):
            raise self.changed(f"line {line.index + 1} has changed")
        return bool(checksum)

    def verify(self, requests: Path) -> bool:
        """Compare the lines that have results with those of the request file; returns whether some
        lines have no result yet.
        """
        num_results, some_left = len(self), False
        for line in read_lines(requests):
            if self.has(line):
                num_results -= 1
            else:
                some_left = True
            if some_left and not num_results:
                return True
        if num_results:
            raise self.changed("some are missing")
        return some_left

    def __len__(self) -> int:
        return len(self.checksums) - self.checksums.count(0)

    def changed(self, how: str) -> ConfigError:
        return ConfigError(
            f"{self.path} has the results of other requests than these, {how}: "
            "name another file for the results, or start over with --overwrite"
        )

    def checksum(self, line: Line) -> int:
        return half_checksum(line.data) << HALF_BITS | self.settings

    def begin(self) -> None:
        """Start to change the file: truncate it to its complete results, or, with overwrite, to
        nothing.
        """
        if os.fstat(self.handle).st_size > self.num_valid_bytes:
            os.ftruncate(self.handle, self.num_valid_bytes)

    def write(self, line: Line, record: Mapping[str, Any]) -> None:
        """Append a result, in one system call where possible."""
        result = {"index": line.index, **record, "check": f"{self.checksum(line):016x}"}
        try:
            data = json.dumps(result, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
            data = json.dumps(result).encode()
        data += b"\n"
        try:
            while data:
                data = data[os.write(self.handle, data) :]
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror or error}; "
                "once it can, the same command resumes"
            ) from error
        self.record(line.index, self.checksum(line))

    def close(self) -> None:
        with suppress(OSError):
            os.fsync(self.handle)
        os.close(self.handle)  # releases the lock


def not_regular(path: Path) -> ConfigError:
    """Devices, pipes and sockets cannot be read back, which resuming needs."""
    return ConfigError(f"{path} cannot take the results: it is no regular file; name another file")
