"""Strict JSON for metrics, one object per line, and for the summary of a run.

`JsonLines` writes a line per record to metrics_file and flushes it. If the key is not set, the file
is metrics.jsonl in metrics_dir. A resumed run continues the file: lines of steps that will run
again are dropped, and so is an incomplete line. A run that starts at step 0 renames an older file.

JSON has no NaN and no infinity. `encode` writes a non-finite number as null, and `not_finite` has
its name: {"step": 7, "loss": null, "not_finite": {"loss": "NaN"}}. Each line stays valid JSON, a
null alone means unknown, and `decode` restores the number. The names are NaN, Infinity and
-Infinity.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.files import atomic_writer, write_text
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.record import Record

NOT_FINITE = "not_finite"


def encode(values: Mapping[str, object], indent: int | None = None) -> str:
    """A mapping as JSON. Other types (paths, enums) are written as strings."""
    return json.dumps(replace_nonfinite(values), indent=indent, allow_nan=False, default=str)


def replace_nonfinite(value: object) -> object:
    """A copy with null for non-finite numbers; a mapping also gets an entry `not_finite`."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of numpy or JAX
        value = value.item()
    if isinstance(value, Mapping):
        nonfinite = {
            str(name): nonfinite_name(entry)
            for name, entry in value.items()
            if nonfinite_name(entry)
        }
        copy = {str(name): replace_nonfinite(entry) for name, entry in value.items()}
        return {**copy, NOT_FINITE: nonfinite} if nonfinite else copy
    if isinstance(value, list | tuple):
        return [replace_nonfinite(entry) for entry in value]
    return None if nonfinite_name(value) else value


def nonfinite_name(value: Any) -> str:
    """The name of a non-finite number, or an empty string."""
    try:
        number = float(value) if not isinstance(value, str) else 0.0
    except (TypeError, ValueError, OverflowError):
        return ""
    if math.isfinite(number):
        return ""
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def decode(line: str | bytes) -> Record:
    """Parse a line of metrics. Raises ValueError if it is incomplete or not a record."""
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError("not a record: it is no JSON object with a step")
    for name, text in values.pop(NOT_FINITE, {}).items():
        values[name] = float(text)
    return values


def read_metrics(path: str | os.PathLike) -> list[Record]:
    """The records of a metrics_file. Damaged lines are skipped, and their number is logged."""
    records, damaged = [], 0
    with open(path, "rb") as file:
        for line in file:
            try:
                records.append(decode(line))
            except ValueError:
                damaged += 1
    if damaged:
        LOGGER.warning("%s: skipped %d damaged line(s)", path, damaged)
    return records


def write_summary(path: str | os.PathLike, values: Mapping[str, object]) -> None:
    """Write a JSON file atomically."""
    write_text(path, encode(values, indent=2) + "\n")


def metrics_path(config: MaxTextConfig) -> str:
    """The file that a run writes its metrics to."""
    return config.metrics_file or os.path.join(config.metrics_dir, "metrics.jsonl")


def read_history(config: MaxTextConfig, first_step: int) -> list[Record]:
    """The records of the steps before `first_step`, at which the run resumes. Empty if the file is
    a pipe or a device, or was not written then."""
    path = Path(metrics_path(config)).expanduser()
    if not first_step or not path.is_file():
        return []
    return [record for record in read_metrics(path) if (record["step"] or 0) < first_step]


class JsonLines:
    """`first_step`: 0, or the step at which the run resumes."""

    def __init__(self, path: str | os.PathLike, first_step: int = 0):
        self.path = Path(path).expanduser().resolve()  # a rename must not replace a link
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file() and self.path.stat().st_size:  # not a pipe or a device
                if first_step:
                    drop_from(self.path, first_step)
                else:
                    rename_old(self.path)
            self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise ConfigError(f"metrics_file={path} cannot be written: {error}") from error

    def write(self, record: Record) -> None:
        self.file.write(encode(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def drop_from(path: Path, first_step: int) -> None:
    """Rewrite the file without damaged lines and without steps from `first_step` on, if needed."""

    def is_valid(line: bytes) -> bool:
        try:
            return (decode(line)["step"] or 0) < first_step
        except ValueError:
            return False

    lines = path.read_bytes().splitlines(keepends=True)
    valid = [line.rstrip(b"\n") + b"\n" for line in lines if is_valid(line)]
    if valid == lines:
        return
    with atomic_writer(path, "wb") as file:
        file.writelines(valid)
    if len(valid) < len(lines):
        LOGGER.info(
            "%s: dropped %d line(s) that are incomplete or of steps from %d on",
            path,
            len(lines) - len(valid),
            first_step,
        )


def rename_old(path: Path) -> None:
    """Rename to the first free name.1, name.2, …"""
    number = 1
    while (old := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(old)
    LOGGER.info("%s is from an earlier run: renamed to %s", path, old.name)
