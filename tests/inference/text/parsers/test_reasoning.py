"""Reasoning in texts that come in parts of any size, and grammars that begin after it."""

import json

import pytest

from maxtext.inference.sampling.grammar import GrammarCompiler
from maxtext.inference.sampling.structured_outputs import StructuredOutputs
from maxtext.inference.server.completions_writer import MessageBuilder
from maxtext.inference.server.messages import MessageFormat
from maxtext.inference.server.tools import ToolOptions
from maxtext.inference.text.parsers.message_parser import MessageParser
from maxtext.inference.text.parsers.reasoning import Reasoning, find_reasoning_parser
from maxtext.tokenizers.hugging_face import HuggingFaceTokenizer

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
TAGS = ("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")
INSIDE = Reasoning("think", starts_inside=True)
OVER = Reasoning("think", is_over=True)
FREE, WANTED, HARMONY = Reasoning("think"), Reasoning("think", is_wanted=True), Reasoning("harmony")


def parse(message_format, text, size):
    """The message of a text in parts of `size` characters."""
    parser, message = message_format.build_parser(), MessageBuilder()
    for start in range(0, max(len(text), 1), size):
        for delta in parser.add(text[start : start + size], last=start + size >= len(text)):
            message.add(delta)
    return message


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("reasoning", "text", "thought", "content"),
    [
        (FREE, "<think>\nHm\n\nso.\n</think>\n\nYes\n", "Hm\n\nso.", "Yes\n"),
        (FREE, "\n<think></think>Yes", "", "Yes"),
        (FREE, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (FREE, "<think>cut of", "cut of", ""),
        (FREE, "<thi", "", "<thi"),
        (FREE, "", "", ""),
        (INSIDE, "Hm</think>a</think>b", "Hm", "a</think>b"),
        (INSIDE, "Hm < </thin", "Hm < </thin", ""),
        (OVER, "<think>a</think>b", "", "<think>a</think>b"),
        (Reasoning("seed_oss"), "<seed:think>Hm</think></seed:think>\nYes", "Hm</think>", "Yes"),
        (HARMONY, f"{ANALYSIS}{FINAL}Yes<|return|>", "Hm.", "Yes"),
        (HARMONY, f"{FINAL}Yes", "", "Yes"),
        (HARMONY, "plain < text", "", "plain < text"),
        (HARMONY, "<|channel|>commentary<|message|>First.<|end|>", "", "First."),
    ],
)
def test_reasoning_precedes_the_answer(reasoning, text, thought, content, size):
    message = parse(MessageFormat(reasoning=reasoning), text, size)
    assert (message.reasoning, message.content) == (thought, content)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_calls_after_reasoning(size):
    tools = ToolOptions({"f": {}}, "auto")
    text = '<think>maybe <tool_call></think><tool_call>{"name": "f"}</tool_call>'
    message = parse(MessageFormat(tools, FREE, "hermes"), text, size)
    assert (message.reasoning, message.content) == ("maybe <tool_call>", "")
    assert [call["function"]["name"] for call in message.calls] == ["f"]
    message = parse(MessageFormat(tools, HARMONY, "harmony"), ANALYSIS + HARMONY_CALL, size)
    assert (message.reasoning, message.content) == ("Hm.", "")
    (call,) = message.calls
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"x": 1})
    broken = HARMONY_CALL.replace('"x"', "x")
    message = parse(MessageFormat(tools, HARMONY, "harmony"), broken, size)
    assert (message.content, message.calls) == ("{x: 1}", [])


@pytest.mark.parametrize("size", [1, 6, 1000])
@pytest.mark.parametrize(
    ("reasoning", "parser", "text"),
    [
        (HARMONY, "harmony", ANALYSIS + HARMONY_CALL + HARMONY_CALL.replace("1", "2")),
        (
            FREE,
            "hermes",
            "<think>Hm.</think>"
            + 2 * '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
        ),
    ],
)
def test_only_the_first_call_without_parallel_calls(reasoning, parser, text, size):
    for parallel, num_calls in ((True, 2), (False, 1)):
        tools = ToolOptions({"f": {}}, "auto", parallel=parallel)
        message = parse(MessageFormat(tools, reasoning, parser), text, size)
        assert (message.reasoning, message.content) == ("Hm.", "")
        arguments = [json.loads(call["function"]["arguments"]) for call in message.calls]
        assert (len(arguments), arguments[0]) == (num_calls, {"x": 1})


def test_both_names_in_messages_and_deltas():
    message = MessageBuilder()
    (delta,) = INSIDE.build_parser(MessageParser()).add("Hm", last=True)
    names = {"reasoning_content": "Hm", "reasoning": "Hm"}
    assert message.add(delta) == names
    assert names.items() <= message.message().items()


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_tags_that_are_special_tokens_are_no_content(size):
    message_format = MessageFormat(reasoning=FREE, hidden_tags=("<think>", "</think>"))
    assert parse(message_format, "Yes</think>. <th", size).content == "Yes. <th"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("user: hi\nassistant: ", FREE),
        ("user: <think>\nassistant: <think>\n", INSIDE),
        ("assistant: <think>\n\n</think>\n\n", OVER),
        ("assistant: <think>a</think>b\nassistant: ", FREE),
        ("user: <think> hi\nassistant: ", FREE),
    ],
)
def test_state_by_the_end_of_the_prompt(prompt, expected):
    assert Reasoning.from_prompt("think", prompt) == expected


def test_state_of_a_message_that_is_continued():
    assert Reasoning.from_prompt("think", "assistant: <think>I am", continues=True) == INSIDE


def test_tags_of_seed_oss():
    prompt = "<seed:bos>assistant\n<seed:think>"
    inside = Reasoning("seed_oss", starts_inside=True)
    assert Reasoning.from_prompt("seed_oss", prompt) == inside
    assert Reasoning.from_prompt("seed_oss", prompt + "</seed:think>").is_over
    assert (inside.span.start, inside.span.end) == ("", "</seed:think>")
    assert find_reasoning_parser("{{ '<seed:think>' }}{{ '</seed:think>' }}") == "seed_oss"


def write_tokenizer(folder, special):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def tokenizer(request, tmp_path_factory):
    """One whose tags are special tokens, as those of gpt-oss, or not, as those of Qwen3."""
    return write_tokenizer(tmp_path_factory.mktemp("tags"), request.param)


@pytest.mark.parametrize(
    ("reasoning", "text", "fits"),
    [
        (INSIDE, "any\n<text></think>\n\nred", True),
        (INSIDE, "any</think>blue", False),
        (INSIDE, "red", True),  # so far, it is reasoning
        (WANTED, "<think>any</think>red", True),
        (WANTED, "red", True),
        (WANTED, "any</think>red", False),
        (FREE, "red", True),
        (FREE, "<think>any</think>red", False),
        (OVER, "red", True),
        (HARMONY, f"{ANALYSIS}{FINAL}red", True),
        (HARMONY, f"{FINAL}red", True),
        (HARMONY, "red", False),
    ],
)
@pytest.mark.parametrize("kind", ["choice", "regex", "json"])
def test_grammar_begins_after_the_reasoning(tokenizer, reasoning, text, fits, kind):
    contents = {"choice": ["red", "green"], "regex": "red|green", "json": {"const": "red"}}
    constraint = StructuredOutputs.parse({kind: contents[kind]})
    constraint = StructuredOutputs(
        constraint.kind, constraint.text, preamble=reasoning.preamble(tokenizer)
    )
    (eos,) = tokenizer.encode_with_specials("<eos>")
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size, [eos]).matcher(constraint)
    answer = text.replace("red", '"red"') if kind == "json" else text
    ids = tokenizer.encode_with_specials(answer)
    assert (matcher.accept(ids) == len(ids)) == fits


@pytest.mark.parametrize(
    ("reasoning", "text", "count"),
    [
        (FREE, "<think>abc</think>de", 3),
        (FREE, "abc", 0),
        (FREE, "ab<think>c</think>", 0),
        (INSIDE, "abc</think>de", 3),
        (INSIDE, "abc", 3),
        (OVER, "abc", 0),
        (HARMONY, f"{ANALYSIS}{FINAL}de", 3),
        (HARMONY, f"{FINAL}de", 0),
    ],
)
def test_count_of_reasoning_tokens(tokenizer, reasoning, text, count):
    assert reasoning.count_tokens(tokenizer.encode_with_specials(text), tokenizer) == count


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n\\n</think>' }}", "think"),
        ("<|start|>assistant<|channel|>final", "harmony"),
        ("{{ messages }}", "none"),
    ],
)
def test_parser_of_a_template(template, name):
    assert find_reasoning_parser(template) == name
