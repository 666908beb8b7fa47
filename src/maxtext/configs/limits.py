"""Limits that follow from the type of a key: what counters, float32, text files and local paths can
hold.

Narrower bounds, which follow from the meaning of a key, are those of its declaration.
"""

import os
from collections.abc import Iterable, Iterator

from maxtext.common.files import UNPRINTABLE, path_problem
from maxtext.configs.problems import Problem, ProblemKind
from maxtext.configs.provenance import Source
from maxtext.configs.types import Settings, declaration

FLOAT32_MAX = 3.4028234663852886e38
# Paths that must stay inside another folder.
INNER_PATHS = {
    "run_name": "base_output_directory",
    "checkpoint_todelete_subdir": "the checkpoints' folder",
}


def problems(config: Settings, keys: Iterable[str]) -> list[Problem]:
    """A problem for each of the keys whose value is beyond the limits of its type."""
    problems = []
    for key in keys:
        value = getattr(config, key)
        reason = value_problem(key, value)
        if not reason and declaration(key).is_path and is_chosen(config.source(key)):
            reason = local_path_problem(key, value)
        if reason:
            message = f"{key}={abbreviated(value)} ({config.source(key)}) {reason}"
            problems.append(Problem(key, ProblemKind.OUT_OF_RANGE, message))
    return problems


def is_chosen(source: Source) -> bool:
    """False for values of a model's file and defaults, whose paths are not checked."""
    return source.is_user or source.kind == "derived"


def value_problem(key: str, value: object) -> str | None:
    """A problem with the numbers and strings of a value, as the end of a sentence, or None."""
    for leaf in leaves(value):
        if isinstance(leaf, str):
            if "\0" in leaf or has_surrogates(leaf):
                return "has a NUL character, or bytes that are not UTF-8: leave them out"
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            limit = declaration(key).limit
            if abs(leaf) > limit:
                return f"is out of range: whole numbers are at most {limit:,} here"
        elif isinstance(leaf, float) and abs(leaf) > FLOAT32_MAX:
            return f"is out of range: numbers are at most {FLOAT32_MAX:.2g}, the largest float32"
    return None


def local_path_problem(key: str, value: object) -> str | None:
    """Why a value cannot be a path of this machine, as the end of a sentence."""
    if not isinstance(value, str):
        return None
    return path_problem(value) or (outside_folder(key, value) if key in INNER_PATHS else None)


def outside_folder(key: str, value: str) -> str | None:
    names = value.split("/")
    if os.path.isabs(value) or any(name in (".", "..") for name in names):
        return (
            f"would be outside of {INNER_PATHS[key]}: use a name without a leading / and without "
            ".. or ."
        )
    return None


def leaves(value: object) -> Iterator[object]:
    """The numbers and strings in nested lists and mappings, including keys of mappings."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(key)
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def abbreviated(value: object) -> str:
    """A value for a message, on one line and at most 60 characters long."""
    text = (
        str(getattr(value, "value", value))
        if isinstance(value, int)
        else repr(getattr(value, "value", value))
    )
    text = UNPRINTABLE.sub("\ufffd", text)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text):,} characters)"
