"""Checks of the fields of a request, shared by `LLM`, `maxtext batch` and the server.

Every error is a `RequestError`: one sentence that begins with the name of the field, which is also
its `param`.
"""

import json
import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from maxtext.common.errors import UserError

MAX_SHOWN = 60  # characters of a value in a message
MAX_BIASES = 100_000  # tokens of logit_bias
TOKEN_ID = re.compile("0|[1-9][0-9]{0,99}")  # Python converts at most 4300 digits


class RequestError(UserError):
    """A request that cannot be served. `param` is the field that is wrong, if it is one field;
    `code` identifies errors that clients handle, such as context_length_exceeded.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


def shorten(value: object) -> str:
    """A value as JSON where it has one, cut to MAX_SHOWN characters. Of a large value, only the
    beginning is written.
    """
    text = ""
    try:
        for chunk in json.JSONEncoder().iterencode(value):
            text += chunk
            if len(text) > MAX_SHOWN:
                break
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def check_number(name: str, value: object) -> None:
    if type(value) in (int, float):
        return  # as of JSON, and fast
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} must be a number, not {shorten(value)}", name)


def check_whole_number(name: str, value: object) -> None:
    if type(value) is int:
        return  # as of JSON, and fast
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} must be a whole number, not {shorten(value)}", name)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {shorten(value)}", name)


def check_range(name: str, value: Any, low: float, high: float, whole: bool = False) -> None:
    """Raise RequestError unless a value is a number from `low` to `high`; NaN is rejected."""
    check_whole_number(name, value) if whole else check_number(name, value)
    if not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        limits = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise RequestError(f"{name}={str(value)[:MAX_SHOWN]} must be {kind} {limits}", name)


def check_texts(name: str, value: Any, max_count: int, max_length: int) -> tuple[str, ...]:
    """A text or a list of texts as a tuple. Raises RequestError if one is empty or too long, or if
    there are too many.
    """
    texts = (value,) if isinstance(value, str) else value
    is_list = isinstance(texts, list | tuple)
    if not is_list or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts, none of them empty", name)
    if len(texts) > max_count:
        raise RequestError(f"{name} has {len(texts)} texts: at most {max_count} are allowed", name)
    longest = max(map(len, texts), default=0)
    if longest > max_length:
        raise RequestError(
            f"{name} has a text of {longest} characters: at most {max_length} are allowed", name
        )
    return tuple(texts)


def check_token_ids(name: str, value: object, max_count: int | None = None) -> tuple[int, ...]:
    """A list of token ids as a tuple. Raises RequestError if there are too many."""
    if isinstance(value, list | tuple):
        if max_count is not None and len(value) > max_count:
            raise RequestError(
                f"{name} has {len(value)} tokens: at most {max_count} are allowed", name
            )
        if set(map(type, value)) <= {int} and min(value, default=0) >= 0:
            return tuple(value)  # as of JSON, and fast
        if all(map(is_id, value)):
            return tuple(map(int, value))
    raise RequestError(f"{name} must be a list of token ids, not {shorten(value)}", name)


def check_logit_bias(name: str, value: object, limit: float) -> dict[int, float]:
    """Biases by token id; JSON has the ids as texts."""
    if not isinstance(value, Mapping):
        raise RequestError(
            f'{name} must be an object such as {{"50256": -100}}, not {shorten(value)}', name
        )
    if len(value) > MAX_BIASES:
        raise RequestError(
            f"{name} has {len(value)} tokens: at most {MAX_BIASES} are allowed", name
        )
    biases = {}
    for token, bias in value.items():
        # Other spellings, such as "07", could give a token two biases.
        is_text = isinstance(token, str) and TOKEN_ID.fullmatch(token)
        if not is_text and not is_id(token):
            raise RequestError(f"{name} has the key {shorten(token)}, which is no token id", name)
        if not is_number_up_to(bias, limit):
            raise RequestError(
                f"{name} of token {shorten(token)} must be a number from {-limit:g} to {limit:g}, "
                f"not {shorten(bias)}",
                name,
            )
        biases[int(token)] = float(bias)
    return biases


def is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def is_number_up_to(value: Any, limit: float) -> bool:
    """Whether a value is a number from -limit to limit. An integer may have any size."""
    is_number = isinstance(value, int | float | Real) and not isinstance(value, bool)
    return is_number and not value < -limit and not value > limit and value == value
