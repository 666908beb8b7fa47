"""Calls of functions, in texts that come in parts of any size and under a grammar."""

import json

import httpx
import pytest

from maxtext import LLM
from maxtext.inference.server.tools import (
    HermesParser,
    NamedCallParser,
    RequiredCallParser,
    move_refs,
    parse_tools,
)
from maxtext.inference.validation import RequestError
from tests.inference.server.local_server import run_server
from tests.inference.test_structured_outputs import SCHEMAS, SIZES

CALL = '<tool_call>{"name": "f", "arguments": {"x": "ü}"}}</tool_call>'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMAS[index]}}
    for index, name in enumerate(("add_person", "set_tags"))
]


def parse(parser, text, size):
    """(content, [[name, arguments], ...]) of a text in parts of `size` characters."""
    content, calls = "", []
    starts = range(0, max(len(text), 1), size)
    for start in starts:
        part = text[start : start + size]
        for delta in parser.add(part, last=start + size >= len(text)):
            content += delta.content
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append([delta.name, ""])
            if delta.index is not None:
                calls[delta.index][1] += delta.arguments
    return content, calls


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("no calls < here <tool", "no calls < here <tool", []),
        (f"I call. {CALL}", "I call. ", [{"x": "ü}"}]),
        (f"{CALL}\n{CALL}\n", "", [{"x": "ü}"}] * 2),
        (CALL.removesuffix("</tool_call>"), "", [{"x": "ü}"}]),
        ("<tool_call>{bad</tool_call> on", "<tool_call>{bad</tool_call> on", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("<tool_call>{", "<tool_call>{", []),
    ],
)
def test_hermes_calls(text, content, arguments, size):
    parsed_content, calls = parse(HermesParser(), text, size)
    assert parsed_content == content
    assert [(name, json.loads(each)) for name, each in calls] == [("f", each) for each in arguments]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_calls_by_grammar(size):
    arguments = '{"a": {"b": "}"}, "c": [{}]}'
    text = '{"name": "f\\"g", "arguments": ' + arguments + " }"
    assert parse(RequiredCallParser(), text, size) == ("", [['f"g', arguments]])
    assert parse(NamedCallParser("f"), arguments, size) == ("", [["f", arguments]])


def test_references_move_with_their_schema():
    schema = {"$defs": {"p": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/p"}, {"$ref": "#"}]}
    moved = move_refs(schema, "#/properties/arguments")
    assert [each["$ref"] for each in moved["anyOf"]] == [
        "#/properties/arguments/$defs/p",
        "#/properties/arguments",
    ]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tools", {"tools": {}}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [TOOLS[0], TOOLS[0]]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "always"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}),
    ],
)
def test_wrong_tools_name_their_field(field, body):
    with pytest.raises(RequestError) as caught:
        parse_tools(body)
    assert caught.value.param == field


@pytest.mark.slow
def test_required_calls_of_a_random_model_validate(few_programs):
    jsonschema = pytest.importorskip("jsonschema")
    llm = LLM.load("qwen3-0.6b", **SIZES)
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 100}
    named = {"type": "function", "function": {"name": "set_tags"}}
    with run_server(llm, length=256) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        for seed, choice in enumerate(("required", "required", named)):
            ask = {**body, "tool_choice": choice, "seed": seed}
            (result,) = client.post("/v1/chat/completions", json=ask).json()["choices"]
            assert (result["finish_reason"], result["message"]["content"]) == ("tool_calls", None)
            (call,) = result["message"]["tool_calls"]
            index = ("add_person", "set_tags").index(call["function"]["name"])
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[index])
            response = client.post("/v1/chat/completions", json={**ask, "stream": True})
            chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
            assert [part["index"] for part in parts] == [0] * len(parts)
            assert parts[0]["type"] == "function"
            assert parts[0]["function"]["name"] == call["function"]["name"]
            assert not any("id" in part for part in parts[1:])
            text = "".join(part["function"]["arguments"] for part in parts)
            assert text == call["function"]["arguments"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
