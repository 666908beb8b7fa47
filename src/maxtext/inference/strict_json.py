"""Strict JSON, for the bodies of requests and for the lines of `maxtext batch`.

Numbers and texts that JSON parsers accept beyond the standard are refused: NaN, Infinity and 1e999,
and half surrogate pairs, unless they are wanted. orjson and msgspec, 4 to 10 times as fast on 4 MB
(34 and 12 ms instead of 128), accept a name twice in one object, and orjson reads a whole number of
more than 64 bits as a float.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from maxtext.common.types import Json
from maxtext.inference.validation import MAX_SHOWN, RequestError, shorten

MAX_FIELDS = 1000
MAX_CONTAINERS = 100_000
CONTAINERS = frozenset((dict, list))
MIN_LONG_TEXT = 64 * 1024  # bytes
JSON_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


@dataclass(frozen=True)
class JsonReader:
    """Reads values in JSON. Every error is a RequestError about `subject`."""

    subject: str
    encoding: str = "utf-8"  # utf-8-sig: a byte order mark may precede the text
    allows_half_pairs: bool = False  # of surrogates, which JSON has as escapes
    has_unique_keys: bool = False
    max_depth: int | None = None  # of nested lists and objects; None: what Python's stack takes
    max_digits: int | None = None  # of a whole number; None: what Python converts

    def read(self, data: bytes) -> Any:
        """A value in UTF-8. Raises RequestError for what is not standard JSON, and for an object
        of more than MAX_FIELDS fields or more than MAX_CONTAINERS lists and objects.
        """
        self.check_num_containers(data)
        # The numbers and objects of a long text are functions in Python, between which other
        # threads run. The scanner itself is C, and would stop them all.
        is_long = len(data) > MIN_LONG_TEXT
        try:
            value = json.loads(
                data.decode(self.encoding),
                parse_constant=self.refuse_constant,
                parse_float=self.parse_finite,
                parse_int=self.parse_int if is_long or self.max_digits else None,
                object_pairs_hook=self.unique_keys if self.has_unique_keys else None,
            )
            if not self.allows_half_pairs and b"\\ud" in data.lower():
                check_surrogates(value)
        except UnicodeEncodeError as error:
            message = f"{self.subject} has half of a surrogate pair, which is no text"
            raise RequestError(message) from error
        except UnicodeDecodeError as error:
            message = (
                f"{self.subject} is not UTF-8: byte {error.start} does not continue a character"
            )
            raise RequestError(message) from error
        except RecursionError as error:
            raise self.nested_too_deeply() from error
        except json.JSONDecodeError as error:
            reason = f"{error.msg[:1].lower()}{error.msg[1:]}".removesuffix(" at")
            message = f"{self.subject} is not JSON: {reason} at character {error.pos}"
            raise RequestError(message) from error
        except ValueError as error:  # of int()
            raise RequestError(f"{self.subject} has a number of too many digits") from error
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise RequestError(
                f"{self.subject} has {len(value)} fields: at most {MAX_FIELDS} are allowed"
            )
        self.check_depth(value)
        return value

    def check_num_containers(self, data: bytes) -> None:
        """Raises RequestError for too many lists and objects, before they are created: a million of
        them keeps the interpreter and its garbage collector busy for seconds.
        """
        if data.count(b"[") + data.count(b"{") <= MAX_CONTAINERS:
            return
        num_containers = start = 0
        for text in JSON_TEXT.finditer(data):  # which may have brackets of its own
            num_containers += count_containers(data, start, text.start())
            start = text.end()
            if num_containers > MAX_CONTAINERS:
                break
        if num_containers + count_containers(data, start, len(data)) > MAX_CONTAINERS:
            raise RequestError(f"{self.subject} has more than {MAX_CONTAINERS} lists and objects")

    def check_depth(self, value: object) -> None:
        """Raises RequestError for lists and objects nested more than `max_depth` levels deep."""
        if self.max_depth is None:
            return
        level: list[Any] = [value] if type(value) in CONTAINERS else []
        for _ in range(self.max_depth):
            items = [each.values() if type(each) is dict else each for each in level]
            level = [item for each in items for item in each if type(item) in CONTAINERS]
            if not level:
                return
        raise self.nested_too_deeply()

    def nested_too_deeply(self) -> RequestError:
        if self.max_depth is None:
            return RequestError(f"{self.subject} is nested too deeply")
        return RequestError(f"{self.subject} is nested more than {self.max_depth} levels deep")

    def unique_keys(self, pairs: list[tuple[str, object]]) -> Json:
        fields: Json = {}
        for name, value in pairs:
            if name in fields:
                raise RequestError(
                    f"{self.subject} has {name[:MAX_SHOWN]!r} twice in one object: which of the "
                    "two?"
                )
            fields[name] = value
        return fields

    def parse_int(self, text: str) -> int:
        if self.max_digits is not None and len(text) > self.max_digits:
            raise RequestError(
                f"{self.subject} has a number of {len(text)} digits: "
                f"at most {self.max_digits} are allowed"
            )
        return int(text)

    def refuse_constant(self, text: str) -> None:
        raise RequestError(f"{self.subject} is not JSON: {text} is no number")

    def parse_finite(self, text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise RequestError(f"{self.subject} has the number {shorten(text)}, which is too large")
        return number


def count_containers(data: bytes, start: int, end: int) -> int:
    return data.count(b"[", start, end) + data.count(b"{", start, end)


def check_surrogates(value: object) -> None:
    """Raises UnicodeEncodeError if a text has half of a surrogate pair."""
    values = [value]
    while values:
        each = values.pop()
        if isinstance(each, str):
            each.encode("utf-8")
        elif isinstance(each, dict):
            values += each
            values += each.values()
        elif isinstance(each, list):
            values += each
