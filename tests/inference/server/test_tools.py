"""Calls of functions that requests offer, and calls under a grammar."""

import json

import httpx
import pytest

from maxtext import LLM
from maxtext.inference.server.tools import move_refs, parse_tools
from maxtext.inference.validation import RequestError
from tests.inference.server.local_server import run_server
from tests.inference.test_structured_outputs import SCHEMAS, SIZES

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMAS[index]}}
    for index, name in enumerate(("add_person", "set_tags"))
]


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
        ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
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
