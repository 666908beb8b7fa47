"""From one line of a batch job to a generation request. An error in a line concerns that line
only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext.cli.generation import GenerationSession
from maxtext.common.errors import UserError
from maxtext.configs.sources import suggest
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling_params import SamplingParams
from maxtext.inference.strict_json import JsonReader
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
# Results carry the id, so all of a line can be written as JSON again: Python's writer has limits.
READER = JsonReader(
    "the line",
    encoding="utf-8-sig",
    allows_half_pairs=True,
    has_unique_keys=True,
    max_depth=100,
    max_digits=1000,
)


def parse_line(data: bytes) -> dict[str, Any]:
    record = READER.read(data)
    if not isinstance(record, dict):
        raise UserError('the line is not a JSON object such as {"prompt": "I love to"}')
    return record


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
