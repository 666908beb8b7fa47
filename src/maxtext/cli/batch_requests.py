"""From one line of a batch job to what the model is asked; whatever is wrong with a line is said of
it alone.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext.cli.answering import Answering
from maxtext.common.errors import UserError
from maxtext.configs.sources import suggest
from maxtext.inference import Ask
from maxtext.inference.sampling import Sampling

SAMPLING = ("temperature", "top_k", "top_p")
FIELDS = ("prompt", "messages", "id", "max_new_tokens", *SAMPLING, "seed", "stop")
MAX_DEPTH = (
    100  # of nested lists and objects: Python's JSON writer fails at some depth, as its reader does
)
MAX_DIGITS = 1000  # of a whole number: Python refuses to convert more than a few thousand


def parsed(data: bytes) -> dict[str, Any]:
    """The record of a line, in strict JSON: each key once, numbers that are finite. Whatever it
    holds can be written as JSON again, since answers carry the id."""
    try:
        record = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=unique_keys,
            parse_int=bounded_int,
            parse_float=finite_float,
            parse_constant=refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise UserError("the line is not UTF-8") from error
    except RecursionError as error:
        raise UserError(f"the line is nested more than {MAX_DEPTH} levels deep") from error
    except ValueError as error:
        raise UserError(f"the line is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError('the line is not a JSON object such as {"prompt": "I love to"}')
    check_depth(record)
    return record


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in pairs:
        if name in record:
            raise UserError(f"the line has {name!r} twice in one object: which of the two?")
        record[name] = value
    return record


def bounded_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise UserError(f"the line has a number of {len(text)} digits: {MAX_DIGITS} are the most")
    return int(text)


def finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UserError(f"the line has the number {text[:40]}, which is too large")
    return value


def refuse_constant(text: str) -> None:
    raise UserError(f"the line is not JSON: {text} is no JSON number")


def check_depth(record: dict[str, Any]) -> None:
    level: list[Any] = [record]
    for _ in range(MAX_DEPTH):
        inner = [
            item for each in level for item in (each.values() if isinstance(each, dict) else each)
        ]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise UserError(f"the line is nested more than {MAX_DEPTH} levels deep")


def ask_of(record: Mapping[str, Any], index: int, model: Answering, sampling: Sampling) -> Ask:
    """`sampling`: of the configuration; the line may say otherwise."""
    for name in record:
        if name not in FIELDS:
            raise UserError(
                f"unknown field {name!r}{suggest(name, FIELDS) or '; what is to be carried along is id'}"
            )
    if ("prompt" in record) == ("messages" in record):
        raise UserError("a line has either a prompt or messages")
    ids = prompt_ids(record, model)
    room = model.room(ids)
    wanted = number(record, "max_new_tokens", int, room)
    if not 1 <= wanted <= room:
        raise UserError(
            f"max_new_tokens={wanted} must be between 1 and {room}: the prompt has {len(ids)} tokens and "
            f"max_target_length={model.config.max_target_length}"
        )
    return Ask(
        ids,
        wanted,
        drawn(record, sampling),
        seed=number(record, "seed", int, model.config.init_weights_seed + index),
        stop=stops(record.get("stop", ())),
        log_probs=model.config.return_log_prob,
    )


def prompt_ids(record: Mapping[str, Any], model: Answering) -> list[int]:
    if "messages" in record:
        return model.conversation(checked_messages(record["messages"]))
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return model.prompt(prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise UserError("prompt must be text or a list of token ids")


def checked_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """The conversation, if it is a list of messages that each have a role and a text."""
    if not isinstance(messages, list):
        raise UserError('messages must be a list such as [{"role": "user", "content": "hello"}]')
    if not messages:
        raise UserError("messages is empty: a conversation has at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UserError(f"messages[{number}] must be an object with role and content")
        for name in ("role", "content"):
            if name not in message:
                raise UserError(f"messages[{number}] has no {name}")
            if not isinstance(message[name], str):
                raise UserError(
                    f"messages[{number}].{name} must be text, not {shortened(message[name])}"
                )
        if not message["role"]:
            raise UserError(f"messages[{number}].role is empty: say who speaks, such as user")
    return messages


def shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def drawn(record: Mapping[str, Any], sampling: Sampling) -> Sampling:
    """How tokens are chosen: what the line says, the rest as the configuration has it."""
    said = {
        name: number(record, name, int if name == "top_k" else float, 0)
        for name in SAMPLING
        if name in record
    }
    base = Sampling() if said.get("temperature") == 0 else sampling
    return dataclasses.replace(base, **said)


def number(record: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = record.get(name, default)
    if type(value) is not int and not (kind is float and type(value) is float):
        raise UserError(
            f"{name} must be a {'whole number' if kind is int else 'number'}, not {shortened(value)}"
        )
    if name == "seed" and not 0 <= value < 2**32:
        raise UserError(f"seed={value} must be between 0 and {2**32 - 1}")
    return value


def stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(
        isinstance(text, str) and text for text in texts
    ):
        raise UserError("stop must be a text or a list of texts, none of them empty")
    return tuple(texts)
