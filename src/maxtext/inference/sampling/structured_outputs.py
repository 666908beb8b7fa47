"""Constraints on the text of a completion: JSON, a JSON schema, a regex, one of some texts, or a
context-free grammar.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from maxtext.inference.validation import RequestError, shorten

KINDS = ("json", "regex", "choice", "grammar")
NAME = "structured_outputs"
# Limits of what compiles within about a second.
MAX_CHARACTERS = 1 << 18  # of a schema or a grammar
MAX_CHOICES = 10_000
# Of all values of `multipleOf` in a schema: as an automaton, each has a state for every remainder.
MAX_REMAINDERS = 100_000
# Chains of them are followed by recursion in the grammar library, which no error ends.
MAX_RULES = MAX_REFERENCES = 2500
MAX_PATTERNS = 1000
MULTIPLE_OF = re.compile(r'"multipleOf": ([0-9.eE+-]+)')


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint of one kind. `text` is a JSON schema, a regex, a JSON list of texts, or a
    grammar in Lark or GBNF syntax. `param` is the field of the request that it came from, for
    errors. `preamble`, a grammar in Lark syntax, matches what precedes the constrained text.
    """

    kind: str
    text: str
    param: str = NAME
    preamble: str = ""

    @classmethod
    def parse(cls, value: object) -> "StructuredOutputs":
        """{"json": schema}, {"regex": text}, {"choice": [text, ...]} or {"grammar": text}. A schema
        is an object, a JSON text, or true for any object, as is {"json_object": true}. null and
        false are the same as absent. Raises RequestError for anything else.
        """
        if isinstance(value, StructuredOutputs):
            return value
        given = dict(value) if isinstance(value, Mapping) else {}
        given = {kind: content for kind, content in given.items() if content not in (None, False)}
        if given == {"json_object": True}:
            given = {"json": True}
        if len(given) != 1 or next(iter(given)) not in KINDS:
            raise RequestError(
                f"{NAME} must be an object with exactly one of {', '.join(KINDS)}, not "
                f"{shorten(value)}",
                NAME,
            )
        ((kind, content),) = given.items()
        return cls.from_kind(kind, content, NAME, f"{NAME}.{kind}")

    @classmethod
    def from_kind(cls, kind: str, content: object, param: str, name: str) -> "StructuredOutputs":
        """The constraint of one of KINDS. `name` is that of `content` in errors about `param`."""
        if kind == "json":
            return cls(kind, schema_text(content, param), param)
        if kind == "choice":
            texts = content if isinstance(content, list | tuple) else ()
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise RequestError(f"{name} must be a list of texts, none of them empty", param)
            if len(texts) > MAX_CHOICES:
                raise RequestError(
                    f"{name} has {len(texts)} texts: at most {MAX_CHOICES} are allowed", param
                )
            return cls(kind, limited(json.dumps(list(texts)), param), param)
        if not isinstance(content, str) or not content:
            raise RequestError(f"{name} must be text, not {shorten(content)}", param)
        if kind == "grammar":
            check_count(content, ":", MAX_RULES, "rules", param)
        return cls(kind, limited(content, param), param)


def parse_response_format(value: object, name: str = "response_format") -> StructuredOutputs | None:
    """The `response_format` of OpenAI's API: {"type": "text"}, {"type": "json_object"}, or
    {"type": "json_schema", "json_schema": {"schema": ...}}. `name` is that of the field in
    errors, text.format for a part of the field `text`. Raises RequestError for other values.
    """
    param = name.partition(".")[0]
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutputs("json", schema_text(True, name), param)
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return StructuredOutputs("json", schema_text(schema, name), param)
        case {"type": "json_schema"}:
            raise RequestError(f"{name}.json_schema.schema is missing", param)
        case {"type": kind} if kind:
            value = kind
    raise RequestError(
        f"{name}.type must be text, json_object or json_schema, not {shorten(value)}", param
    )


def schema_text(schema: object, name: str) -> str:
    """A schema as canonical JSON. `name` is that of the field in errors."""
    param = name.partition(".")[0]
    if schema is True:
        schema = {"type": "object"}
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} has a schema that is not JSON: {error}", param) from error
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"{name} must have a JSON schema, an object, not {shorten(schema)}", param
        )
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} has a schema that is not JSON: {error}", param) from error
    check_count(text, '"$ref"', MAX_REFERENCES, "references", name)
    check_count(text, '"pattern"', MAX_PATTERNS, "patterns", name)
    if sum(map(num_remainders, MULTIPLE_OF.findall(limited(text, name)))) > MAX_REMAINDERS:
        raise RequestError(
            f"{name} has a multipleOf that is too large: at most "
            f"{MAX_REMAINDERS} remainders are allowed",
            param,
        )
    return text


def num_remainders(divisor: str) -> int:
    """Of a number in JSON syntax, in units of its last decimal place: 0.25 has 25."""
    number = Decimal(divisor)
    places = max(-int(number.normalize().as_tuple().exponent), 0)
    return int(abs(number).scaleb(places))


def check_count(text: str, mark: str, limit: int, what: str, name: str) -> None:
    """Raises RequestError if a text has more than `limit` marks, one for each of `what`."""
    if (count := text.count(mark)) > limit:
        message = f"{name} has {count} {what}: at most {limit} are allowed"
        raise RequestError(message, name.partition(".")[0])


def limited(text: str, name: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"{name} has {len(text)} characters: at most {MAX_CHARACTERS} are allowed",
            name.partition(".")[0],
        )
    return text
