"""Bodies of requests as JSON objects, and the kinds of values that their fields have.

null is the same as absent in every field. Errors are `RequestError`, with the name of the field.
"""

import json
from collections.abc import Mapping
from typing import Any

from maxtext.inference.strict_json import JsonReader
from maxtext.inference.validation import RequestError, check_bool, shorten

Body = Mapping[str, Any]
MAX_DEPTH = 128  # of lists and objects in each other, for recursive functions
READER = JsonReader("the body", has_unique_keys=True, max_depth=MAX_DEPTH)
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # of a message


def parse_body(data: bytes) -> dict[str, Any]:
    """A JSON object, without the fields that are null. Raises RequestError for anything else."""
    body = READER.read(data)
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def flag(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name, default)
    check_bool(name, value)
    return value


def text_field(body: Body, name: str, default: str = "") -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, not {shorten(value)}", name)
    return value


def object_field(body: Body, name: str) -> Body:
    value = body.get(name, {})
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object, not {shorten(value)}", name)
    return value


def parse_prompts(body: Body) -> list[str | list[int]]:
    """The prompts of /v1/completions: a text, texts, token ids, or lists of token ids."""
    prompt: Any = body.get("prompt")
    if isinstance(prompt, str) or is_ids(prompt):
        return [prompt]
    is_list = isinstance(prompt, list) and bool(prompt)
    if not is_list or not (
        all(isinstance(each, str) for each in prompt or ()) or all(map(is_ids, prompt or ()))
    ):
        raise RequestError(
            "prompt must be text, a list of texts, token ids, or a list of lists of token ids, "
            f"none of them empty, not {shorten(prompt)}",
            "prompt",
        )
    return list(prompt or ())


def is_ids(value: Any) -> bool:
    """Whether a value of JSON is a list of token ids: integers, which Booleans are not."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0


def parse_messages(body: Body) -> list[dict[str, Any]]:
    """The messages of a conversation, with their contents as text: parts of text are joined."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}]', "messages"
        )
    return [parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def parse_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name} must be an object with a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get(part.get("type")) if is_text(part) else None for part in content]
        parts = [text for text in texts if isinstance(text, str)]
        if len(parts) < len(texts):
            raise RequestError(
                f"{name} has a part that is not text, which this model does not read", "messages"
            )
        content = "".join(parts)
    if not isinstance(message.get("tool_calls") or [], list):
        raise RequestError(f"{name}.tool_calls must be a list", "messages")
    if content is None and message["role"] == "assistant" and not message.get("tool_calls"):
        content = message.get("refusal") or ""  # it may have reasoning alone
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise RequestError(f"{name}.content must be text or parts of text", "messages")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):  # templates have different names for it
        message = {**message, **dict.fromkeys(REASONING_NAMES, reasoning)}
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [parse_call(each) for each in message["tool_calls"]]}
    return {**message, "content": content}


def is_text(part: Any) -> bool:
    """Whether a part of a content is text, of which a refusal is a kind."""
    return isinstance(part, Mapping) and part.get("type") in ("text", "refusal")


def parse_call(call: Any) -> Any:
    """A call of a message, with its arguments as an object, which templates write as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("tool_calls of a message must have functions with names", "messages")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        return call
    JsonReader("the arguments of a call", max_depth=MAX_DEPTH).check_depth(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
