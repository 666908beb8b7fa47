"""The files of a batch job, and the rows of a training batch as text for the terminal.

`read_lines` reads requests, one line at a time, and a `ResultFile` appends results, one complete
line at a time. A result carries the index of its line and a checksum of that line and of the
settings that decide results. So a job that was stopped, in any way, knows from its results what is
left, and a job whose requests or settings have changed is refused before it mixes results that do
not belong together.

`segment_text` shows the decoded tokens of a row. In fine-tuning, tokens that are trained on have
another colour or, if the output is no terminal, stand between ⟦ and ⟧.
"""

import array
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

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


COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
# Characters that move the cursor, change colours or the direction of a line; not newlines and tabs.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
TRAINED_ON, NOT_TRAINED_ON = "green", "bright_black"  # colours in fine-tuning
MARKS = ("⟦", "⟧")


@dataclass(frozen=True)
class Segment:
    """A document in a row. `loss_mask` is that of the targets; None: all are trained on. `side`
    is chosen or rejected in a preference pair.
    """

    inputs: np.ndarray
    targets: np.ndarray
    loss_mask: np.ndarray | None = None
    side: str = ""

    def tokens(self) -> np.ndarray:
        """All tokens: the inputs and the last target, since targets are inputs shifted by one."""
        return np.append(self.inputs, self.targets[-1:])

    def token_mask(self) -> np.ndarray:
        """The mask of `tokens`."""
        if self.loss_mask is None:
            return np.ones(len(self.targets) + 1, bool)
        return np.append(False, self.loss_mask)


Row = list[Segment]


def sides(batch: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The fields of the chosen and the rejected sequences of pairs, or of the batch itself."""
    from maxtext.input_pipeline.interface import FIELDS, PAIR_SIDES

    if "inputs" in batch:
        return {"": batch}
    return {side: {field: batch[f"{side}_{field}"] for field in FIELDS} for side in PAIR_SIDES}


def segments(batch: dict[str, np.ndarray], row: int, masked: bool) -> Row:
    """The segments of a row; of a pair, the chosen and the rejected sequence."""
    result = []
    for side, fields in sides(batch).items():
        segment_ids = fields["inputs_segmentation"][row]
        loss_mask = fields["targets_segmentation"][row] != 0
        for number in range(1, int(segment_ids.max()) + 1):
            where = segment_ids == number
            result.append(
                Segment(
                    fields["inputs"][row][where],
                    fields["targets"][row][where],
                    loss_mask=loss_mask[where] if masked else None,
                    side=side,
                )
            )
    return result


class TextDecoder:
    """Decodes tokens to text; special tokens are shown by name."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.is_special = lru_cache(None)(self.is_special_token)

    def is_special_token(self, token: int) -> bool:
        if token in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            return True
        # Decoding also drops a leading space, but a space is not a special token.
        return not self.tokenizer.decode([token]) and bool(
            self.tokenizer.id_to_token(token).strip("▁ ")
        )

    def spans(self, segment: Segment) -> Iterator[tuple[str, bool, bool]]:
        """(text, whether it is the name of a special token, whether it is trained on) of runs of
        tokens.
        """
        tokens = zip(segment.tokens().tolist(), segment.token_mask().tolist(), strict=True)
        for (special, trained_on), run in groupby(
            tokens, lambda token: (self.is_special(token[0]), token[1])
        ):
            if special:
                yield from (
                    (self.tokenizer.id_to_token(token), True, trained_on) for token, _ in run
                )
            else:
                yield self.tokenizer.decode([token for token, _ in run]), False, trained_on


class IdPrinter:
    """Shows token ids, for tokenized data whose tokenizer is not set."""

    def spans(self, segment: Segment) -> Iterator[tuple[str, bool, bool]]:
        yield " ".join(map(str, segment.tokens().tolist())), False, True


def visible(text: str) -> str:
    """The text with control characters escaped as in Python."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def segment_text(
    segment: Segment, decoder: TextDecoder | IdPrinter, index: int, is_plain: bool
) -> Any:
    """The decoded tokens in the colour of the segment or, if it has a mask, of tokens that
    are trained on and of others.
    """
    from rich.text import Text

    line, masked, inside = Text(), segment.loss_mask is not None, False
    for text, special, trained_on in decoder.spans(segment):
        colour = COLOURS[index % len(COLOURS)]
        if masked:
            colour = TRAINED_ON if trained_on else NOT_TRAINED_ON
        if masked and is_plain and trained_on != inside:
            line.append(MARKS[inside])
            inside = trained_on
        line.append(visible(text), style=f"bold reverse {colour}" if special else colour)
    return line.append(MARKS[1]) if inside else line
