"""The bodies of /v1/responses as bodies of /v1/chat/completions.

The server keeps no state: `input` is the whole conversation.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from maxtext.common.log import LOGGER
from maxtext.inference.sampling_params import SamplingParams
from maxtext.inference.server.bodies import Body, flag, object_field, text_field
from maxtext.inference.server.fields import (
    CONVERSATION_FIELDS,
    RESPONSES_CHAT_FIELDS,
    RESPONSES_FIELDS,
    UNSUPPORTED,
    check_names,
)
from maxtext.inference.server.request_parser import ApiRequest, RequestParser, parse_stream_options
from maxtext.inference.structured_outputs import StructuredOutputs
from maxtext.inference.validation import RequestError, check_range, check_whole_number, shorten

# Values of `include`. They are about output that the server never has: of tools that it would run
# itself, images, and reasoning that a client may not read.
INERT_INCLUDES = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
# Names of fields in the chat that a body becomes, where the name in the body is another one.
CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
# What errors about some of them say.
MESSAGE_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def parse_responses_request(parser: RequestParser, body: Body) -> ApiRequest:
    """The body of /v1/responses. Raises RequestError with the names of its fields."""
    for name in CONVERSATION_FIELDS:
        if body.get(name):
            raise RequestError(
                f"{name} is not supported: this server keeps no conversations, so send the whole "
                "conversation as input",
                name,
                UNSUPPORTED,
            )
    ignored = check_names(body, RESPONSES_FIELDS, "/v1/responses", parser.strict_fields)
    check_unsupported_values(body)
    try:
        request = parser.chat(chat_body(body))
    except RequestError as error:
        name = error.param or ""
        message = str(error)
        if name in MESSAGE_NAMES:
            message = message.replace(name, MESSAGE_NAMES[name])
        raise RequestError(message, CHAT_NAMES.get(name, error.param), error.code) from error
    params = request.requests[0].params
    constraint = params.structured_outputs
    if isinstance(constraint, StructuredOutputs):  # it is compiled later, with errors of its own
        param = CHAT_NAMES.get(constraint.param, constraint.param)
        params = replace(params, structured_outputs=replace(constraint, param=param))
    return replace(
        request,
        requests=(replace(request.requests[0], params=params),),
        ignored_fields=ignored,
        settings=response_settings(body, params),
    )


def check_unsupported_values(body: Body) -> None:
    """Raises RequestError if a field that a chat does not have is malformed, or asks for something
    that the response would lack.
    """
    include = body.get("include", [])
    if not isinstance(include, list):
        raise RequestError(f"include must be a list of texts, not {shorten(include)}", "include")
    for value in include:
        if value not in INERT_INCLUDES:
            raise RequestError(f"include may not have {shorten(value)}", "include", UNSUPPORTED)
    parse_stream_options(body, "include_usage")
    if body.get("truncation", "disabled") != "disabled":
        raise RequestError(
            f"truncation must be disabled, not {shorten(body['truncation'])}",
            "truncation",
            UNSUPPORTED,
        )
    for name in ("top_logprobs", "prompt_logprobs"):
        check_whole_number(name, body.get(name, 0))
        if body.get(name):
            raise RequestError(
                "/v1/responses has no log-probabilities: use /v1/chat/completions",
                name,
                UNSUPPORTED,
            )
    if "max_tool_calls" in body:  # of tools that the server would run
        check_range("max_tool_calls", body["max_tool_calls"], 1, math.inf, whole=True)
    for name in ("context_management", "moderation"):
        if body.get(name):
            raise RequestError(f"{name} is not supported", name, UNSUPPORTED)
    flag(body, "store")
    object_field(body, "client_metadata")
    for group, name in (("reasoning", "summary"), ("text", "verbosity")):
        value = object_field(body, group).get(name)
        if not isinstance(value, str | None):
            raise RequestError(f"{group}.{name} must be text, not {shorten(value)}", group)


def chat_body(body: Body) -> dict[str, Any]:
    """The body of a chat that a body of /v1/responses stands for."""
    chat: dict[str, Any] = {name: body[name] for name in RESPONSES_CHAT_FIELDS if name in body}
    chat["messages"] = parse_input(body)
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    tools = parse_functions(body.get("tools", []))
    if tools:
        chat["tools"] = tools
    if "tool_choice" in body:
        chat["tool_choice"] = parse_choice(body["tool_choice"])
    if (text_format := object_field(body, "text").get("format")) is not None:
        chat["response_format"] = parse_format(text_format)
    if (effort := object_field(body, "reasoning").get("effort")) is not None:
        chat["reasoning_effort"] = effort
    return chat


def parse_functions(tools: Any) -> list[dict[str, Any]]:
    """The functions among `tools`; others are ignored."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(f"tools must be a list of objects, not {shorten(tools)}", "tools")
    others = sorted(
        {str(tool.get("type"))[:40] for tool in tools if tool.get("type") != "function"}
    )
    if others:
        LOGGER.warning("ignoring tools of the types %s in /v1/responses", ", ".join(others))
    names = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {name: tool[name] for name in names if name in tool}}
        for tool in tools
        if tool.get("type") == "function"
    ]


def parse_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        allowed = list(map(parse_choice, tools)) if isinstance(tools, list) else tools
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": allowed},
        }
    if isinstance(choice, Mapping):
        kind = shorten(choice.get("type"))
        raise RequestError(
            f"tool_choice.type must be function or allowed_tools, not {kind}", "tool_choice"
        )
    return choice


def parse_format(text_format: Any) -> Any:
    """The field text.format as a response_format."""
    if isinstance(text_format, Mapping) and text_format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": text_format.get("schema")}}
    return text_format


def parse_input(body: Body) -> list[dict[str, Any]]:
    """The messages of `instructions` and `input`."""
    messages: list[dict[str, Any]] = []
    if instructions := text_field(body, "instructions"):
        messages.append({"role": "system", "content": instructions})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestError("input must be text or a list of items", "input")
    for index, item in enumerate(items):
        add_item(messages, item, f"input[{index}]")
    return messages


def add_item(messages: list[dict[str, Any]], item: Any, name: str) -> None:
    """Append an item of the input to a conversation. What the model wrote in one turn, its
    reasoning, content and calls, is one message.
    """
    if not isinstance(item, Mapping):
        raise RequestError(f"{name} must be an object, not {shorten(item)}", "input")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        content = join_parts(item.get("content"), f"{name}.content")
        if role == "assistant":
            turn = open_turn(messages)
            turn["content"] = (turn["content"] or "") + content
        elif role in ("system", "developer") and messages and messages[-1]["role"] == "system":
            messages[-1]["content"] += f"\n\n{content}"  # many templates take only one
        else:
            messages.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind == "reasoning":
        text = join_parts(item.get("content") or item.get("summary") or "", f"{name}.content")
        turn = open_turn(messages)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        open_turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        if output is None:
            raise RequestError(f"{name}.output is missing", "input")
        is_text = isinstance(output, str | list)
        content = join_parts(output, f"{name}.output") if is_text else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    else:
        raise RequestError(f"{name} has the type {shorten(kind)}, which is not supported", "input")


def open_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message, if the model wrote it, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def join_parts(content: Any, name: str) -> str:
    """The text of a content: a text, or a list of parts of text."""
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS
        text = part.get("refusal", part.get("text")) if is_text else None
        if not isinstance(text, str):
            raise RequestError(f"{name} must be text or parts of text", "input")
        texts.append(text)
    return "".join(texts)


def response_settings(body: Body, params: SamplingParams) -> dict[str, Any]:
    """The fields of a request that its response repeats, `params` with the model's defaults."""
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": object_field(body, "metadata"),
        "parallel_tool_calls": flag(body, "parallel_tool_calls", default=True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None, **object_field(body, "reasoning")},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **object_field(body, "text")},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
    }
