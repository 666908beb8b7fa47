"""The two files of a batch job: requests, read one line at a time, and answers, appended a whole
line at a time.

An answer carries the number of its line and a sum of that line and of the settings that shape
answers. So a job that was stopped, by any means, knows from its answers alone what is left, and one
whose requests or settings have changed is refused before it mixes answers that do not belong
together.
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

HALF = 32  # bits of a sum: the upper half is the line's, the lower half that of the settings


@dataclass(frozen=True)
class Line:
    index: int
    data: bytes


def lines(path: Path) -> Iterator[Line]:
    """The lines that are not blank, numbered as they stand in the file, from 0."""
    try:
        with path.open("rb") as stream:
            for index, data in enumerate(stream):
                if data.strip():
                    yield Line(index, data)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def sum_of(data: bytes) -> int:
    """Half a sum; never 0, which stands for no answer."""
    return int.from_bytes(hashlib.blake2b(data.strip(), digest_size=HALF // 8).digest(), "big") or 1


class Answers:
    """The file of answers, of which this process is the only writer. `settings`: whatever shapes
    the answers.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool):
        self.path = path
        self.settings = sum_of(json.dumps(settings, sort_keys=True, default=str).encode())
        self.sums = array.array("Q")  # by the number of the line; 0 where there is no answer yet
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
            self.whole = 0 if overwrite else self.read()
        except BaseException:
            self.close()
            raise

    def read(self) -> int:
        """Take in what is answered; returns the bytes of whole lines, for the last one may be
        torn.
        """
        whole = 0
        with self.path.open("rb") as stream:
            for number, data in enumerate(stream, 1):
                if not data.endswith(b"\n"):
                    break
                try:
                    record = json.loads(data)
                    index, found = int(record["index"]), int(record["check"], 16)
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise ConfigError(
                        f"line {number} of {self.path} is no answer of `maxtext batch`: name another file, or replace "
                        "this one with --overwrite"
                    ) from error
                if found & ((1 << HALF) - 1) != self.settings:
                    raise ConfigError(
                        f"{self.path} has answers of another model or of other settings of prompts and sampling: "
                        "run with those, name another file, or begin anew with --overwrite"
                    )
                self.note(index, found)
                whole += len(data)
        return whole

    def note(self, index: int, found: int) -> None:
        if index >= len(self.sums):
            self.sums.frombytes(bytes(8 * (index + 1 - len(self.sums))))
        self.sums[index] = found

    def has(self, line: Line) -> bool:
        """Whether a line is answered; a line that is another one now is an error."""
        found = self.sums[line.index] if line.index < len(self.sums) else 0
        if found and found != self.check(line):
            raise self.changed(f"line {line.index + 1} is another one now")
        return bool(found)

    def verify(self, requests: Path) -> bool:
        """Hold the lines that are answered against those that were read then; returns whether some
        are left.
        """
        answered, some_left = len(self), False
        for line in lines(requests):
            if self.has(line):
                answered -= 1
            else:
                some_left = True
            if some_left and not answered:
                return True
        if answered:
            raise self.changed("they have become fewer")
        return some_left

    def __len__(self) -> int:
        return len(self.sums) - self.sums.count(0)

    def changed(self, how: str) -> ConfigError:
        return ConfigError(
            f"{self.path} answers other requests than these, {how}: name another file for the answers, or begin anew "
            "with --overwrite"
        )

    def check(self, line: Line) -> int:
        return sum_of(line.data) << HALF | self.settings

    def begin(self) -> None:
        """From here on the file changes: what is no whole answer is cut off, or all with
        overwrite.
        """
        if os.fstat(self.handle).st_size > self.whole:
            os.ftruncate(self.handle, self.whole)

    def write(self, line: Line, record: Mapping[str, Any]) -> None:
        """Append an answer, by one call of the system where it can be."""
        named = {"index": line.index, **record, "check": f"{self.check(line):016x}"}
        try:
            data = json.dumps(named, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
            data = json.dumps(named).encode()
        data += b"\n"
        try:
            while data:
                data = data[os.write(self.handle, data) :]
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror or error}; the same command goes on once it can"
            ) from error
        self.note(line.index, self.check(line))

    def close(self) -> None:
        with suppress(OSError):
            os.fsync(self.handle)
        os.close(self.handle)  # and with it goes the lock


def not_regular(path: Path) -> ConfigError:
    """Devices, pipes and sockets cannot be read back, which a job that goes on must do."""
    return ConfigError(f"{path} cannot take the answers: it is no regular file; name another file")
