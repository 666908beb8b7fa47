"""Functions that requests offer."""

import time

import pytest

from maxtext.inference.server.protocol import ChatRequest, JsonBody
from maxtext.inference.server.tools import move_refs
from maxtext.inference.validation import RequestError
from tests.support.offered_tools import TOOLS


def parse_tools(body):
    messages = [{"role": "user", "content": "Hi"}]
    return JsonBody({"messages": messages, **body}).parse(ChatRequest).tool_options


def allowed(*names, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_the_template_and_the_grammar_get(mode):
    """As if the request offered no others."""
    body = {"tools": TOOLS, "tool_choice": allowed("set_tags", mode=mode)}
    assert parse_tools(body) == parse_tools({"tools": TOOLS[1:], "tool_choice": mode})
    assert parse_tools({"tools": TOOLS}).definitions == tuple(TOOLS)


def test_many_allowed_tools():
    """The time grows with their number, not with its square."""
    names = [f"f{index}" for index in range(15_000)]
    choice = allowed(*names)
    start = time.thread_time()
    options = parse_tools({"tools": choice["allowed_tools"]["tools"], "tool_choice": choice})
    assert time.thread_time() - start < 2
    assert len(options.definitions) == len(names)


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
        ("tools", {"tools": [{**TOOLS[0], "type": "custom"}]}),
        ("tools", {"tools": [{"function": {"name": "f", "parameters": "x"}}]}),
        ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "always"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": allowed("other")}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": allowed("add_person", mode="none")}),
    ],
)
def test_wrong_tools_name_their_field(field, body):
    with pytest.raises(RequestError) as caught:
        parse_tools(body)
    assert caught.value.param == field
