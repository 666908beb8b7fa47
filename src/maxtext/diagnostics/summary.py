"""Strict JSON for metrics (one object per line) and for the summary of a run.

JSON has no NaN and no infinity. A non-finite number is written as null, and `not_finite` has its
name: {"step": 7, "loss": null, "not_finite": {"loss": "NaN"}}. Each line stays valid JSON, a null
alone means unknown, and `decode` restores the number. The names are NaN, Infinity and -Infinity.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from maxtext.common.files import write_text
from maxtext.common.log import LOGGER
from maxtext.diagnostics.record import Record

NOT_FINITE = "not_finite"


def encode(values: Mapping[str, object], indent: int | None = None) -> str:
    """A mapping as JSON. Other types (paths, enums) are written as strings."""
    return json.dumps(replace_nonfinite(values), indent=indent, allow_nan=False, default=str)


def replace_nonfinite(value: object) -> Any:
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
