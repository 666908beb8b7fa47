"""Tool calls in texts that come in parts of any size, as model families write them."""

import json
import random

import pytest

from maxtext.inference.text.parsers.message_parser import (
    FirstCallParser,
    NamedCallParser,
    RequiredCallParser,
)
from maxtext.inference.text.parsers.tool_calls import (
    TOOL_PARSERS,
    build_tool_parser,
    find_tool_parser,
)

CALL = '<tool_call>{"name": "f", "arguments": {"x": "ü}"}}</tool_call>'
CODER_CALL = """<tool_call>
<function=f>
<parameter=x>
two
lines
</parameter>
<parameter=n>
3
</parameter>
<parameter=flag>True</parameter>
<parameter=text>7</parameter>
</function>
</tool_call>"""
SEED_CALL = CODER_CALL.replace("tool_call>", "seed:tool_call>")
GLM_CALL = """<tool_call>f
<arg_key>x</arg_key>
<arg_value>two
lines</arg_value>
<arg_key>n</arg_key>
<arg_value>3</arg_value>
<arg_key>flag</arg_key>
<arg_value>true</arg_value>
<arg_key>text</arg_key>
<arg_value>7</arg_value>
</tool_call>"""
GLM_INLINE = (
    "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>x</arg_key>"
    "<arg_value></tool_call></arg_value></tool_call>"
)
MINIMAX_CALL = """<minimax:tool_call>
<invoke name="f">
<parameter name="x">two
lines</parameter>
<parameter name="n">3</parameter>
<parameter name="flag">true</parameter>
<parameter name="text">7</parameter>
</invoke>
</minimax:tool_call>"""
MINIMAX_TWO = """<minimax:tool_call>
<invoke name="f"><parameter name="n">1</parameter></invoke>
<invoke name=f>
<parameter name=n>2</parameter>
</invoke>
</minimax:tool_call>"""
SCHEMAS = {
    "f": {
        "properties": {
            "x": {"type": "string"},
            "n": {"type": "integer"},
            "flag": {"type": "boolean"},
            "text": {"type": "string"},
        }
    }
}
CODER_ARGUMENTS = {"x": "two\nlines", "n": 3, "flag": True, "text": "7"}
X = {"x": "ü}"}
# The end of a call within a string of its arguments, as in code about tool calls.
TAG = {"x": 'see "<tool_call>{}</tool_call>", \\</tool_call>'}
TAG_CALL = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(TAG)}}}\n</tool_call>'
TAG_FIRST = f'<tool_call>{{"arguments": {json.dumps(TAG)}, "name": "f"}}</tool_call>'
CODER_TAG = """<tool_call>
<function=f>
<parameter=x>
if "</tool_call>" in text: # </function>
</tool_call>
</parameter>
<parameter=n>3</parameter>
</function>
</tool_call>"""
CODER_TAG_ARGUMENTS = {"x": 'if "</tool_call>" in text: # </function>\n</tool_call>', "n": 3}
CODER_CUT = "<tool_call><function=f><parameter=n>1</parameter><parameter=x>a"
F = '{"name": "f", "parameters": {"x": "ü}"}}'
CUT = '<tool_call>{"name": "f", "arguments": {"x": "cut'
CASES = [
    ("hermes", "no calls < here <tool", "no calls < here <tool", []),
    ("hermes", f"I call. {CALL}", "I call. ", [X]),
    ("hermes", f"{CALL}\n{CALL}\n", "", [X, X]),
    ("hermes", CALL.removesuffix("</tool_call>"), "", [X]),
    ("hermes", "<tool_call>{bad</tool_call> on", "<tool_call>{bad</tool_call> on", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", "<tool_call>{", "<tool_call>{", []),
    ("hermes", f"{TAG_CALL}\n{CALL}", "", [TAG, X]),
    ("hermes", f"{TAG_CALL} then", " then", [TAG]),
    ("hermes", TAG_FIRST, "", [TAG]),
    ("hermes", TAG_CALL.removesuffix("\n</tool_call>"), "", [TAG]),
    ("qwen3_coder", f"So: {CODER_CALL}", "So: ", [CODER_ARGUMENTS]),
    ("qwen3_coder", f"{CODER_CALL}\n{CODER_CALL}", "", [CODER_ARGUMENTS] * 2),
    ("qwen3_coder", "<tool_call>\n<function=f></function>\n</tool_call>", "", [{}]),
    ("qwen3_coder", f"{CODER_TAG} then", " then", [CODER_TAG_ARGUMENTS]),
    ("qwen3_coder", f"{CODER_TAG}\n{CODER_CALL}", "", [CODER_TAG_ARGUMENTS, CODER_ARGUMENTS]),
    ("qwen3_coder", "<tool_call>words</tool_call>", "<tool_call>words</tool_call>", []),
    ("glm45", f"So: {GLM_CALL}", "So: ", [CODER_ARGUMENTS]),
    ("glm45", f"{GLM_CALL}\n{GLM_CALL}", "", [CODER_ARGUMENTS] * 2),
    ("glm45", "<tool_call>f\n</tool_call>", "", [{}]),
    ("glm45", "<tool_call>f</tool_call> on", " on", [{}]),
    ("glm45", GLM_INLINE, "", [{"n": 3, "x": "</tool_call>"}]),
    ("glm45", "<tool_call>words</tool_call>", "<tool_call>words</tool_call>", []),
    ("glm45", "<tool_call>two words\n</tool_call>", "<tool_call>two words\n</tool_call>", []),
    ("seed_oss", f"So: {SEED_CALL}", "So: ", [CODER_ARGUMENTS]),
    ("seed_oss", f"{SEED_CALL}\n{SEED_CALL}", "", [CODER_ARGUMENTS] * 2),
    ("minimax_m2", f"So:\n{MINIMAX_CALL}", "So:\n", [CODER_ARGUMENTS]),
    ("minimax_m2", MINIMAX_TWO, "", [{"n": 1}, {"n": 2}]),
    (
        "minimax_m2",
        f"{MINIMAX_CALL}\n{MINIMAX_TWO} on",
        " on",
        [CODER_ARGUMENTS, {"n": 1}, {"n": 2}],
    ),
    ("minimax_m2", "<minimax:tool_call>a</minimax:tool_call>", ..., []),
    ("llama3_json", F, "", [X]),
    ("llama3_json", f"<|python_tag|>{F}; {F}", "", [X, X]),
    ("llama3_json", 'Say {"name": "f"}', 'Say {"name": "f"}', []),
    ("llama3_json", '{"a": 1} and more', '{"a": 1} and more', []),
    ("llama3_json", '{"name": "f", "par', '{"name": "f", "par', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "ü}"}}]', "", [X]),
    ("mistral", "Yes [TOOL_CALLS]f[ARGS]" + json.dumps(X), "Yes ", [X]),
    ("mistral", ("[TOOL_CALLS]f" + json.dumps(X)) * 2, "", [X, X]),
    ("mistral", "[TOOL_CALLS][CALL_ID", "[TOOL_CALLS][CALL_ID", []),
    ("mistral", "a [TOOL list", "a [TOOL list", []),
    ("none", CALL, CALL, []),
]


def parse(parser, text, size):
    """(content, [[name, arguments], ...]) of a text in parts of `size` characters."""
    content, calls = "", []
    for start in range(0, max(len(text), 1), size):
        part = text[start : start + size]
        for delta in parser.add(part, last=start + size >= len(text)):
            content += delta.content
            if delta.name is not None:
                assert (delta.index, delta.arguments) == (len(calls), "")
                calls.append([delta.name, ""])
            if delta.index is not None:
                calls[delta.index][1] += delta.arguments
    return content, calls


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("name", "text", "content", "arguments"), CASES)
def test_calls_of_families(name, text, content, arguments, size):
    content = text if content is ... else content
    parsed_content, calls = parse(build_tool_parser(name, SCHEMAS), text, size)
    assert parsed_content == content
    assert [(name, json.loads(each)) for name, each in calls] == [("f", each) for each in arguments]


def test_names_of_parsers():
    for name in TOOL_PARSERS:
        assert parse(build_tool_parser(name, SCHEMAS), "text", 1000) == ("text", [])
    for name in ("none", "harmony"):
        assert parse(build_tool_parser(name, SCHEMAS), CALL, 1000) == (CALL, [])
    with pytest.raises(ValueError, match="no tool parser is called 'hermès'"):
        build_tool_parser("hermès", SCHEMAS)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_calls_by_grammar(size):
    arguments = '{"a": {"b": "}"}, "c": [{}]}'
    text = '{"name": "f\\"g", "arguments": ' + arguments + " }"
    assert parse(RequiredCallParser(), text, size) == ("", [['f"g', arguments]])
    assert parse(NamedCallParser("f"), arguments, size) == ("", [["f", arguments]])


def test_only_the_first_of_parallel_calls():
    parser = FirstCallParser(build_tool_parser("hermes", {}))
    content, calls = parse(parser, f"a{CALL}{CALL}", 5)
    assert (content, len(calls)) == ("a", 1)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><function=example>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<seed:tool_call><function=example>", "seed_oss"),
        ("{% set toolcall_begin_token = '<minimax:tool_call>' %}", "minimax_m2"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('{"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<|start|>assistant<|channel|>commentary <|call|>", "harmony"),
        ("{{ messages }}", "none"),
    ],
)
def test_parser_of_a_template(template, name):
    assert find_tool_parser(template) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "two words", "y": [1, {"z": 2}]}}'),
        ("llama3_json", '{"name": "f", "parameters": {"x": "two words", "y": [1, {"z": 2}]}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": "two words", "y": [1]}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": "two words", "y": [1, {"z": 2}]}'),
    ],
)
def test_arguments_are_passed_on_while_they_are_written(name, text):
    """A letter is known at once, those of the closing brackets of the call apart."""
    parser = build_tool_parser(name, {})
    start, end = text.index("two"), text.index('"y"')
    parts = [
        "".join(delta.arguments for delta in parser.add(letter, last=False)) for letter in text
    ]
    assert parts[start:end] == list(text[start:end])
    arguments = "".join(parts)
    assert json.loads(arguments)["x"] == "two words"


def test_parameters_are_passed_on_one_by_one():
    parser = build_tool_parser("qwen3_coder", SCHEMAS)
    before, after = CODER_CALL.split("<parameter=flag>")
    deltas = parser.add(before, last=False)
    assert "".join(delta.arguments for delta in deltas) == '{"x": "two\\nlines", "n": 3'
    deltas = parser.add(f"<parameter=flag>{after}", last=True)
    assert "".join(delta.arguments for delta in deltas) == ', "flag": true, "text": "7"}'


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        # No value has begun: the text is content.
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {\'x\': 1}}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>', ..., []),
        ("llama3_json", '{"name": "f", "parameters": {"x" 1}} so', ..., []),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x"', ..., []),
        # Later, the call has begun, and its arguments are as the model wrote them.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": 1, y}}</tool_call>.',
            ".",
            ['{"x": 1, y}}'],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "cut', "", ['{"x": "cut']),
        # A string that does not end has no tag: the call ends at its first tag.
        ("hermes", f"{CUT}</tool_call>", "", ['{"x": "cut']),
        ("hermes", f"{CUT}</tool_call> So", " So", ['{"x": "cut']),
        ("hermes", f"{CUT}</tool_call>\n{TAG_CALL}", "", ['{"x": "cut', json.dumps(TAG)]),
        ("hermes", f"{CUT}</tool_call>{TAG_CALL}", "", ['{"x": "cut', json.dumps(TAG)]),
        ("llama3_json", '{"name": "f", "parameters": {"x": "cut', "", ['{"x": "cut']),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1, 2}}', "", ['{"x": 1, 2}}']),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1, 2} on', "", ['{"x": 1, 2} on']),
        ("qwen3_coder", "<tool_call><function=f><parameter=n>1</parameter>", "", ['{"n": 1']),
        # A value that does not end has no tag, either.
        ("qwen3_coder", f"{CODER_CUT}</tool_call> So", " So", ['{"n": 1}']),
        (
            "qwen3_coder",
            f"{CODER_CUT}</tool_call>{CODER_CALL}",
            "",
            ['{"n": 1}', json.dumps(CODER_ARGUMENTS)],
        ),
        # What is complete is a call, whatever follows within the tags.
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "", ["{}"]),
        ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", ['{"x": 1}']),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", ["{}"]),
        ("llama3_json", '{"name": "f", "parameters": {}} and', " and", ["{}"]),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_broken_calls(name, text, content, arguments, size):
    content = text if content is ... else content
    parsed_content, calls = parse(build_tool_parser(name, SCHEMAS), text, size)
    assert parsed_content == content
    assert [each for _, each in calls] == arguments


def mutate(text, generator):
    """A text with a few letters that were dropped, doubled or replaced."""
    letters = list(text)
    for _ in range(generator.randint(0, 3)):
        index = generator.randrange(len(letters))
        letters[index] = generator.choice(["", letters[index] * 2, *'{}[]",:x1\\ <'])
    return "".join(letters)


@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", "minimax_m2", "seed_oss"]
)
def test_result_does_not_depend_on_the_sizes_of_parts(name):
    generator = random.Random(name)
    texts = [case[1] for case in CASES if case[0] == name]
    for _ in range(200):
        text = mutate(generator.choice(texts), generator)
        expected = parse(build_tool_parser(name, SCHEMAS), text, len(text) or 1)
        for size in (1, generator.randint(2, 12)):
            assert parse(build_tool_parser(name, SCHEMAS), text, size) == expected, text
