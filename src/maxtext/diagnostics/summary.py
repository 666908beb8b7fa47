"""JSON that other programs can read: metrics as lines, the run's summary as one file.

JSON has no NaN and no infinity. Such a number is written as null, and beside it stands its name in
`not_finite`: {"step": 7, "loss": null, "not_finite": {"loss": "NaN"}}. So every line stays valid
JSON, a null alone still means "not known", and `decode` gives the number back. The words are NaN,
Infinity and -Infinity.
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


def encode(values: Mapping[str, Any], indent: int | None = None) -> str:
    """A mapping as JSON. Unusual values (paths, enums) are written as text."""
    return json.dumps(finite(values), indent=indent, allow_nan=False, default=str)


def finite(value: Any) -> Any:
    """A copy without NaN and infinity; those of a mapping are named in it, those of a list are only
    null.
    """
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of numpy or JAX
        value = value.item()
    if isinstance(value, Mapping):
        words = {str(name): word(entry) for name, entry in value.items() if word(entry)}
        copy = {str(name): finite(entry) for name, entry in value.items()}
        return {**copy, NOT_FINITE: words} if words else copy
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if word(value) else value


def word(value: Any) -> str:
    """The name of a number that JSON cannot hold, or nothing."""
    try:
        number = float(value) if not isinstance(value, str) else 0.0
    except (TypeError, ValueError, OverflowError):
        return ""
    if math.isfinite(number):
        return ""
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def decode(line: str | bytes) -> Record:
    """One line of metrics. ValueError when it is not a record, as after a kill in the middle of a
    write.
    """
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError("not a record: it is no JSON object with a step")
    for name, text in values.pop(NOT_FINITE, {}).items():
        values[name] = float(text)
    return values


def read_metrics(path: str | os.PathLike) -> list[Record]:
    """The records of a metrics_file. A damaged line is left out, and the log says how many were."""
    records, damaged = [], 0
    with open(path, "rb") as stream:
        for line in stream:
            try:
                records.append(decode(line))
            except ValueError:
                damaged += 1
    if damaged:
        LOGGER.warning("%s: left out %d damaged line(s)", path, damaged)
    return records


def write_summary(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """One JSON file, complete or absent."""
    write_text(path, encode(values, indent=2) + "\n")
