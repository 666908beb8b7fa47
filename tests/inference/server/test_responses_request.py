"""Bodies of /v1/responses become conversations."""

import json
import time

import pytest

from maxtext.inference.server.messages import read_items
from maxtext.inference.server.protocol import ChatRequest, JsonBody, ResponsesRequest
from maxtext.inference.server.tools import ToolChoice
from maxtext.inference.validation import RequestError


def parse(body):
    return JsonBody({"input": "Hi", **body}).parse(ResponsesRequest)


def test_conversation_of_items():
    """What the model wrote in one turn is one message."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "wet"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "Both"},
                {"type": "refusal", "refusal": "."},
            ],
        },
        {"role": "user", "content": "Thanks"},
    ]
    messages = [message.to_json() for message in read_items("You help.", items)]
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for name, arguments in (("c1", {"x": 1}), ("c2", {}))
    ]
    assert messages == [
        {"role": "system", "content": "You help.\n\nBe brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Hm"),
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "wet"},
        {"role": "assistant", "content": "Both."},
        {"role": "user", "content": "Thanks"},
    ]


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
CALLS = (
    '"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]'
)
NAMES = '"reasoning": "Hm", "thinking": "Hm"'


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (
            [{"type": "function_call_output", "call_id": "c", "output": "x"}],
            '"role": "tool", "tool_call_id": "c", "content": "x"',
        ),
        (
            [REASONING, CALL],
            f'"role": "assistant", "content": "", "reasoning_content": "Hm", {CALLS}, {NAMES}',
        ),
        (
            [CALL, REASONING, {"role": "assistant", "content": "So"}],
            f'"role": "assistant", "content": "So", {CALLS}, "reasoning_content": "Hm", {NAMES}',
        ),
    ],
)
def test_order_of_the_fields_of_a_message(items, text):
    """A template may write a message as JSON, so the prompt depends on it."""
    (message,) = read_items(None, items)
    assert json.dumps(message.to_json()) == f"{{{text}}}"


def test_many_items_of_one_turn():
    """The time grows with their number, not with its square."""
    start = time.thread_time()
    (message,) = read_items(None, [CALL] * 30_000)
    assert time.thread_time() - start < 2
    assert len(message.tool_calls) == 30_000


def test_fields_of_a_chat():
    schema = {"type": "object"}
    chat = parse(
        {
            "input": "Hi",
            "max_output_tokens": 7,
            "temperature": 0,
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": schema}, {"type": "mcp"}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}},
            "reasoning": {"effort": "low"},
            "store": True,
        }
    ).to_chat()
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 7,
        "temperature": 0,
        "stream": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "reasoning_effort": "low",
    }
    expected = JsonBody(body).parse(ChatRequest)
    assert chat.constraint.text == expected.constraint.text
    names = body.keys() - {"response_format", "tools", "tool_choice"}
    assert [getattr(chat, name) for name in names] == [getattr(expected, name) for name in names]
    assert chat.tool_options == expected.tool_options


def test_allowed_tools_and_constraints():
    tools = [{"type": "function", "name": "f"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    chat = parse({"tools": tools, "tool_choice": choice, "guided_regex": "a"}).to_chat()
    assert chat.choice == ToolChoice("auto", allowed=frozenset({"f"}))
    assert chat.tool_options.definitions == ({"type": "function", "function": {"name": "f"}},)
    assert chat.constraint.text == "a"
    with pytest.raises(RequestError) as caught:
        parse({"prompt_logprobs": 1})
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize(
    "value", [None, 3, {}, [3], [{"role": "user"}], [{"type": "function_call_output"}]]
)
def test_wrong_input(value):
    with pytest.raises(RequestError) as caught:
        parse({"input": value}).to_chat()
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"include": {}}, "include", None),
        ({"include": [5]}, "include", "unsupported_parameter"),
        ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_parameter"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", None),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", None),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options",
            "unsupported_parameter",
        ),
        ({"stream": True, "stream_options": True}, "stream_options", None),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"truncation": {}}, "truncation", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
        ({"top_logprobs": True}, "top_logprobs", None),
        ({"max_tool_calls": 0}, "max_tool_calls", None),
        ({"max_tool_calls": "3"}, "max_tool_calls", None),
        ({"context_management": [{}]}, "context_management", "unsupported_parameter"),
        ({"moderation": {"model": "x"}}, "moderation", "unsupported_parameter"),
        ({"store": "yes"}, "store", None),
        ({"client_metadata": []}, "client_metadata", None),
        ({"reasoning": {"summary": 1}}, "reasoning", None),
        ({"text": {"verbosity": 2}}, "text", None),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", None),
        ({"reasoning": {"effort": 1}}, "reasoning", None),
        ({"max_output_tokens": "3"}, "max_output_tokens", None),
        ({"text": {"format": {"type": "yaml"}}}, "text", None),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text", None),
    ],
)
def test_values_that_are_not_supported(body, param, code):
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_values_without_an_effect():
    """As Codex sends them, and the defaults of OpenAI's documentation."""
    parse({})
    parse(
        {
            "include": ["reasoning.encrypted_content", "web_search_call.results"],
            "store": True,
            "stream": True,
            "stream_options": {
                "include_obfuscation": False,
                "include_usage": None,
                "continuous_usage_stats": "of chunks, which the stream does not have",
            },
            "truncation": "disabled",
            "top_logprobs": 0,
            "max_tool_calls": 3,
            "client_metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low"},
        }
    )
