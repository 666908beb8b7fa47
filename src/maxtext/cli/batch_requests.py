"""From one line of a batch job to a generation request. An error in a line concerns that line
only.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext.cli.generation import GenerationSession
from maxtext.common.errors import UserError
from maxtext.configs.sources import suggest
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling_params import SamplingParams
from maxtext.inference.structured_outputs import parse_response_format
from maxtext.inference.validation import check_whole_number, shorten

# Fields of SamplingParams, which checks them.
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "n",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
FIELDS = (
    "prompt",
    "messages",
    "id",
    "max_new_tokens",
    *SAMPLING_FIELDS,
    "response_format",
    "seed",
    "adapter",
)
MAX_DEPTH = 100  # of nested lists and objects: Python's JSON reader and writer have a limit, too
MAX_DIGITS = 1000  # of a whole number: Python refuses to convert more than a few thousand


def parse_line(data: bytes) -> dict[str, Any]:
    """The record of a line in strict JSON: unique keys, finite numbers. All of it can be written as
    JSON again, since results carry the id.
    """
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
        values = [
            value
            for container in level
            for value in (container.values() if isinstance(container, dict) else container)
        ]
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise UserError(f"the line is nested more than {MAX_DEPTH} levels deep")


def build_request(
    record: Mapping[str, Any], index: int, session: GenerationSession, defaults: SamplingParams
) -> GenerationRequest:
    """The request of a line. `defaults` are the configuration's; the line overrides them."""
    for name in record:
        if name not in FIELDS:
            hint = suggest(name, FIELDS) or "; put data of your own into id"
            raise UserError(f"unknown field {name!r}{hint}")
    if ("prompt" in record) == ("messages" in record):
        raise UserError("a line has either a prompt or messages")
    prompt_ids = encode_record(record, session)
    limit = session.max_new_tokens(prompt_ids)
    max_new_tokens = record.get("max_new_tokens", limit)
    check_whole_number("max_new_tokens", max_new_tokens)
    if not 1 <= max_new_tokens <= limit:
        raise UserError(
            f"max_new_tokens={max_new_tokens} must be between 1 and {limit}: the prompt has "
            f"{len(prompt_ids)} tokens and max_target_length={session.config.max_target_length}"
        )
    seed = record.get("seed", session.config.init_weights_seed + index)
    sampling = {name: record[name] for name in SAMPLING_FIELDS if name in record}
    if "response_format" in record:
        if "structured_outputs" in record:
            raise UserError("a line has either response_format or structured_outputs")
        sampling["structured_outputs"] = parse_response_format(record["response_format"])
    params = dataclasses.replace(defaults, max_new_tokens=max_new_tokens, seed=seed, **sampling)
    adapter = record.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise UserError(f"adapter={adapter!r} must be the name of an adapter, or empty for none")
    return GenerationRequest(prompt_ids, params, adapter)


def encode_record(record: Mapping[str, Any], session: GenerationSession) -> list[int]:
    if "messages" in record:
        return session.encode_chat(check_messages(record["messages"]))
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return session.encode_prompt(prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise UserError("prompt must be text or a list of token ids")


def check_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """Raise UserError unless this is a list of messages that each have a role and a text."""
    if not isinstance(messages, list):
        raise UserError('messages must be a list such as [{"role": "user", "content": "hello"}]')
    if not messages:
        raise UserError("messages is empty: a conversation has at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UserError(f"messages[{index}] must be an object with role and content")
        for name in ("role", "content"):
            if name not in message:
                raise UserError(f"messages[{index}] has no {name}")
            if not isinstance(message[name], str):
                raise UserError(
                    f"messages[{index}].{name} must be text, not {shorten(message[name])}"
                )
        if not message["role"]:
            raise UserError(f"messages[{index}].role is empty: set it, for example to user")
    return messages
