"""From one line of a batch job to what the model is asked; whatever is wrong with a line is said of it alone."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from maxtext.cli.answering import Answering
from maxtext.common.errors import UserError
from maxtext.configs.sources import suggest
from maxtext.inference import Ask
from maxtext.inference.sampling import Sampling

SAMPLING = ("temperature", "top_k", "top_p")
FIELDS = ("prompt", "messages", "id", "max_new_tokens", *SAMPLING, "seed", "stop")


def parsed(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except UnicodeDecodeError as error:
        raise UserError("the line is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the line is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError('the line is not a JSON object such as {"prompt": "I love to"}')
    return record


def ask_of(record: Mapping[str, Any], index: int, model: Answering, sampling: Sampling) -> Ask:
    """`sampling`: of the configuration; the line may say otherwise."""
    for name in record:
        if name not in FIELDS:
            raise UserError(f"unknown field {name!r}{suggest(name, FIELDS) or '; what is to be carried along is id'}")
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
        return model.conversation(record["messages"])
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return model.prompt(prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise UserError("prompt must be text or a list of token ids")


def drawn(record: Mapping[str, Any], sampling: Sampling) -> Sampling:
    """How tokens are chosen: what the line says, the rest as the configuration has it."""
    said = {name: number(record, name, int if name == "top_k" else float, 0) for name in SAMPLING if name in record}
    base = Sampling() if said.get("temperature") == 0 else sampling
    return dataclasses.replace(base, **said)


def number(record: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = record.get(name, default)
    if type(value) is not int and not (kind is float and type(value) is float):
        raise UserError(f"{name} must be a {'whole number' if kind is int else 'number'}, not {json.dumps(value)}")
    if name == "seed" and not 0 <= value < 2**32:
        raise UserError(f"seed={value} must be between 0 and {2**32 - 1}")
    return value


def stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise UserError("stop must be a text or a list of texts, none of them empty")
    return tuple(texts)
