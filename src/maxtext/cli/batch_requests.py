"""From one line of a batch job to a generation request. An error in a line concerns that line
only.
"""

import dataclasses
from typing import Annotated, Any

from pydantic import PlainValidator

from maxtext.cli.generation import GenerationSession
from maxtext.common.errors import UserError
from maxtext.configs.sources import suggest
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.sampling.structured_outputs import parse_response_format
from maxtext.inference.server.fields import SamplingFields, given_sampling
from maxtext.inference.server.protocol import validate
from maxtext.inference.strict_json import JsonReader
from maxtext.inference.validation import shorten

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


def check_prompt(prompt: Any) -> str | list[int]:
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise UserError("prompt must be text or a list of token ids")
    return prompt


def check_messages(messages: Any) -> list[dict[str, Any]]:
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


def check_adapter(adapter: Any) -> str | None:
    if not isinstance(adapter, str | None):
        raise UserError(f"adapter={adapter!r} must be the name of an adapter, or empty for none")
    return adapter


class BatchLine(SamplingFields):
    """A line. null is a value, which only `id` and `adapter` may have."""

    prompt: Annotated[str | list[int], PlainValidator(check_prompt)] = ""
    messages: Annotated[list[dict[str, Any]], PlainValidator(check_messages)] = []
    id: Any = None
    max_new_tokens: int = 0
    n: Any = None
    response_format: Any = None
    adapter: Annotated[str | None, PlainValidator(check_adapter)] = None

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "BatchLine":
        """Raises UserError for the first field that is unknown or wrong."""
        for name in record:
            if name not in cls.model_fields:
                hint = suggest(name, tuple(cls.model_fields)) or "; put data of your own into id"
                raise UserError(f"unknown field {name!r}{hint}")
        if ("prompt" in record) == ("messages" in record):
            raise UserError("a line has either a prompt or messages")
        if "response_format" in record and "structured_outputs" in record:
            raise UserError("a line has either response_format or structured_outputs")
        return validate(cls, record)

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that the line has."""
        given = given_sampling(self)
        if "response_format" in self.model_fields_set:
            given["structured_outputs"] = parse_response_format(self.response_format)
        return given


def build_request(
    record: dict[str, Any], index: int, session: GenerationSession, defaults: SamplingParams
) -> GenerationRequest:
    """The request of a line. `defaults` are the configuration's; the line overrides them."""
    line = BatchLine.from_record(record)
    if line.messages:
        prompt_ids = session.encode_chat(line.messages)
    elif isinstance(line.prompt, str):
        prompt_ids = session.encode_prompt(line.prompt)
    else:
        prompt_ids = line.prompt
    limit = session.max_new_tokens(prompt_ids)
    is_given = "max_new_tokens" in line.model_fields_set
    max_new_tokens = line.max_new_tokens if is_given else limit
    if not 1 <= max_new_tokens <= limit:
        raise UserError(
            f"max_new_tokens={max_new_tokens} must be between 1 and {limit}: the prompt has "
            f"{len(prompt_ids)} tokens and max_target_length={session.config.max_target_length}"
        )
    seed = session.config.init_weights_seed + index
    sampling = {"seed": seed, **line.sampling(), "max_new_tokens": max_new_tokens}
    params = dataclasses.replace(defaults, **sampling)
    return GenerationRequest(prompt_ids, params, line.adapter)
