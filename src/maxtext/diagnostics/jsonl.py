"""metrics_file: one JSON object a line (format in summary.py), appended and flushed at each record.

A resumed run goes on in the same file as if it had never stopped: lines of steps that will be run
again are dropped, and so is a line that a kill tore. A run that starts at step 0 never mixes with
an older one: the old file is renamed.
"""

import os
from pathlib import Path

from maxtext.common.errors import ConfigError
from maxtext.common.files import atomic_writer
from maxtext.common.log import LOGGER
from maxtext.diagnostics.record import Record
from maxtext.diagnostics.summary import decode, encode


class JsonLines:
    """`first_step` is the step that the run starts with: 0, or the one it resumes at."""

    def __init__(self, path: str | os.PathLike, first_step: int = 0):
        self.path = Path(path).expanduser().resolve()  # a rename must not replace a link
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file() and self.path.stat().st_size:  # not a pipe or a device
                keep_before(self.path, first_step) if first_step else move_aside(self.path)
            self.stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise ConfigError(f"metrics_file={path} cannot be written: {error}") from error

    def write(self, record: Record) -> None:
        self.stream.write(encode(record) + "\n")
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()


def keep_before(path: Path, first_step: int) -> None:
    """Rewrite the file without damaged lines and without steps from `first_step` on; leave a good
    one alone.
    """

    def kept(line: bytes) -> bool:
        try:
            return (decode(line)["step"] or 0) < first_step
        except ValueError:
            return False

    lines = path.read_bytes().splitlines(keepends=True)
    good = [line.rstrip(b"\n") + b"\n" for line in lines if kept(line)]
    if good == lines:
        return
    with atomic_writer(path, "wb") as stream:
        stream.writelines(good)
    if len(good) < len(lines):
        dropped = len(lines) - len(good)
        LOGGER.info(
            "%s: dropped %d line(s) that are torn or of steps from %d on", path, dropped, first_step
        )


def move_aside(path: Path) -> None:
    """Rename to the first free name.1, name.2, …"""
    number = 1
    while (old := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(old)
    LOGGER.info("%s is from an earlier run: renamed to %s", path, old.name)
