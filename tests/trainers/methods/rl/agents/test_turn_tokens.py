"""Tokens between two turns, against the text of transformers for templates of many families."""

import json
import re
from dataclasses import replace
from importlib import resources

import pytest

from maxtext.common.errors import ConfigError
from maxtext.tokenizers import ChatTemplate, open_tokenizer
from maxtext.trainers.methods.rl.agents.conversations import ConversationRunner
from maxtext.trainers.methods.rl.agents.environment import SingleTurn
from maxtext.trainers.methods.rl.agents.tools import CallFormat, ToolEnvironment, Tools
from maxtext.trainers.methods.rl.agents.turn_tokens import TurnTokens
from tests.support.conversations import (
    ADD,
    TEMPLATE,
    ScriptedSampler,
    add,
    conversation,
)
from tests.tokenizers.tiny import CHATML, write_bpe

SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"]*?[|｜]>|<(?:start|end)_of_turn>|</?(?:tool_call|think)>|<turn\|>|<\|turn>"
    r"|<\|?tool_(?:call|response)\|?>"
)
# The token that ends a turn of each family, and one with a call.
ENDS = {
    "qwen3": ("<|im_end|>", "<|im_end|>"),
    "qwen3_5_think": ("<|im_end|>", "<|im_end|>"),
    "gptoss": ("<|end|>", "<|call|>"),
    "llama3_1": ("<|eot_id|>", "<|eot_id|>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gemma4_v5": ("<turn|>", "<|tool_response>"),
    "phi3": ("<|end|>", None),
    "lfm2_2_5": ("<|im_end|>", "<|im_end|>"),
}
TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
ANSWER = {"role": "assistant", "content": "Yes."}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "five"}
FOLLOW_UP = {"role": "user", "content": "Go on."}


def calling(arguments):
    function = {"name": "add", "arguments": arguments}
    call = {"type": "function", "id": "call00000", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.fixture(scope="module")
def family_templates():
    pytest.importorskip("trl")
    folder = resources.files("trl").joinpath("chat_templates")
    return {name: folder.joinpath(f"{name}.jinja").read_text("utf-8") for name in ENDS}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, family_templates):
    """(native, transformers') with the special tokens of all families."""
    from transformers import AutoTokenizer

    folder = write_bpe(tmp_path_factory.mktemp("families") / "bpe")
    hf = AutoTokenizer.from_pretrained(folder)
    tags = sorted({tag for text in family_templates.values() for tag in SPECIAL.findall(text)})
    hf.add_special_tokens({"additional_special_tokens": tags})
    hf.save_pretrained(folder)
    return open_tokenizer(str(folder)), hf


@pytest.mark.parametrize("family", ENDS)
def test_reply_equals_transformers(family, tokenizers, family_templates):
    tokenizer, hf = tokenizers
    source = family_templates[family]
    arguments = {"a": 2}
    cases = [(ANSWER, FOLLOW_UP, (), ENDS[family][0])]
    if ENDS[family][1] is not None:
        call = calling(json.dumps(arguments) if family == "deepseekv3" else arguments)
        cases.append((call, RESULT, TOOLS, ENDS[family][1]))
    for turn, reply, schemas, end in cases:
        tokens = TurnTokens(
            ChatTemplate(source, family, tokenizer.special_tokens), tokenizer, schemas
        )
        whole = hf.apply_chat_template(
            [{"role": "user", "content": "Hi"}, turn, reply],
            chat_template=source, tools=list(schemas) or None, add_generation_prompt=True,
            tokenize=False,
        )  # fmt: skip
        last_token = hf.convert_tokens_to_ids(end)
        after_end = hf.decode(tokens.reply([reply], last_token=last_token))
        assert reply["content"] in after_end
        assert whole.endswith(end + after_end)
        if family != "glm4moe":  # there the end of a turn is the header of the next one
            assert hf.decode(tokens.reply([reply], with_end=True)) == end + after_end


def reply_text(tokenizers, source, messages, **options):
    tokenizer, hf = tokenizers
    tokens = TurnTokens(ChatTemplate(source, "test", tokenizer.special_tokens), tokenizer, [])
    return hf.decode(tokens.reply(messages, **options))


def test_call_that_a_special_token_closes(tokenizers):
    """The template refuses results without a call, and writes JSON between special tokens."""
    source = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
        " %}{{ raise_exception('no call') }}{% endif %}<|im_start|>{{ m.role }}\n{% if m.tool_calls"
        " %}<tool_call>{{ m.tool_calls[0].function.arguments | tojson }}</tool_call>{% else %}"
        "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    expected = "\n<|im_start|>tool\nfive<|im_end|>\n<|im_start|>assistant\n"
    assert reply_text(tokenizers, source, [RESULT]) == expected
    assert reply_text(tokenizers, source, [RESULT], with_end=True) == f"<|im_end|>{expected}"


def test_end_of_the_text_is_not_that_of_the_turn(tokenizers):
    source = CHATML.replace(
        "{% if add", "{% if not add_generation_prompt %}</s>{% endif %}{% if add"
    )
    expected = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert reply_text(tokenizers, source, [FOLLOW_UP]) == expected


def test_header_that_is_always_written(tokenizers):
    source = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
    expected = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert reply_text(tokenizers, source, [FOLLOW_UP], last_token=4) == expected


def test_header_that_the_model_did_not_write_is_kept(tokenizers):
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    _, hf = tokenizers
    user, end = hf.convert_tokens_to_ids(["<|user|>", "</s>"])
    assert reply_text(tokenizers, source, [FOLLOW_UP], last_token=user) == "Go on.<|assistant|>"
    assert (
        reply_text(tokenizers, source, [FOLLOW_UP], last_token=end) == "<|user|>Go on.<|assistant|>"
    )


@pytest.mark.parametrize("text", ["@maxtext-turn@ hi", "?", "{{ messages }}", "Yes.<|im_end|>"])
def test_reply_of_any_text(text, tokenizers):
    expected = f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert reply_text(tokenizers, CHATML, [FOLLOW_UP | {"content": text}]) == expected


def test_variables_of_a_row_hold_in_all_turns(tokenizers):
    tokenizer, hf = tokenizers
    header = "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    source = CHATML.replace("assistant\n{% endif %}", f"assistant\n{header}{{% endif %}}")
    tokens = TurnTokens(ChatTemplate(source, "test", tokenizer.special_tokens), tokenizer, [])

    class Thrice(SingleTurn):
        count = 0

        def step(self, text):
            self.count += 1
            return [FOLLOW_UP], None, self.count == 3

    for thinks in (False, True):
        row = {"prompt": "Hi", "chat_template_kwargs": {"enable_thinking": thinks}}
        opened = replace(conversation(0, Thrice()), row=row)
        runner = ConversationRunner(tokens, length=2000, max_turns=8, max_concurrency=1)
        (rollout,) = runner.run(ScriptedSampler(tokenizer, {0: ["a", "b", "c"]}), [opened])
        ids = [*rollout.prompt_ids, *rollout.token_ids]
        heads = [text.partition("\n")[2] for text in hf.decode(ids).split("<|im_start|>assistant")]
        opening = "" if thinks else "<think>\n\n</think>\n\n"
        assert [head.partition("<|im_end|>")[0] for head in heads[1:]] == [
            f"{opening}{text}" for text in "abc"
        ]


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(
    ("header", "turn", "num_turns"),
    [
        ("", f"<think>maybe {ADD} or not</think>\n\nIt is 5.", 1),
        ("", f"<think>maybe {ADD}</think>\n\n{ADD}", 2),
        ("", f"<think>maybe {ADD}", 1),
        ("<think>\n", f"maybe {ADD}</think>It is 5.", 1),
        ("<think>\n", f"maybe {ADD}", 1),
        ("<think>\n", f"maybe</think>{ADD}", 2),
        ("<think>\n\n</think>\n\n", ADD, 2),
        ("<think>\n\n</think>\n\n", f"<think>{ADD}", 2),
    ],
)
def test_calls_in_reasoning_are_not_executed(header, turn, num_turns, is_special, tokenizers):
    """As the server takes the same text: reasoning is parsed first. In every turn: the first one
    has a call."""
    tokenizer, hf = tokenizers
    tools, call_format = Tools([add]), CallFormat("hermes", "think")
    source = TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{header}{{% endif %}}")
    template = ChatTemplate(source, "test", tokenizer.special_tokens)
    tokens = TurnTokens(template, tokenizer, tools.schemas, tags=call_format.tags)
    runner = ConversationRunner(tokens, length=4000, max_turns=8, max_concurrency=1)
    first = f"</think>{ADD}" if header == "<think>\n" else ADD
    turns = [first, turn, "So.", "So."]
    if is_special:
        turns = [hf.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in turns]
    sampler = ScriptedSampler(tokenizer, {0: turns})
    (rollout,) = runner.run(sampler, [conversation(0, ToolEnvironment(tools, call_format))])
    assert len(rollout.turns) == num_turns + 1
    assert rollout.turns[1] == turn
    results = [message for message in rollout.messages if message["role"] == "tool"]
    assert [message["content"] for message in results] == ["5"] * num_turns


def test_special_tokens_of_calls_are_shown(tokenizers):
    tokenizer, _ = tokenizers
    template = ChatTemplate(TEMPLATE, "test", tokenizer.special_tokens)
    ids = [*tokenizer.encode("a"), 3, *tokenizer.encode("b"), 4]
    assert TurnTokens(template, tokenizer, [], tags=["<|im_start|>"]).text(ids) == "a<|im_start|>b"
    assert TurnTokens(template, tokenizer, []).text(ids) == "ab"


def test_template_without_special_tokens_is_refused(tokenizers):
    source = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    tokens = TurnTokens(ChatTemplate(source, "plain.jinja"), tokenizers[0], [])
    with pytest.raises(ConfigError, match="plain.jinja ends the model's turn with no special"):
        tokens.reply([FOLLOW_UP])
