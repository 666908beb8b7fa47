"""Tokens of the assistant in a conversation, against transformers' assistant masks for templates
with `{% generation %}`, and by prefixes of token ids for templates without.
"""

import logging

import numpy as np
import pytest

from maxtext.common.errors import UserError
from maxtext.tokenizers import ChatTemplate, open_tokenizer
from maxtext.tokenizers.assistant_mask import REPORTED, tokenize_chat
from tests.tokenizers.tiny import CHATML, write_bpe

MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The text of a macro is written at once, when the macro ends.
IN_MACRO = (
    "{% macro turn(m) %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{{ '\n' }}{% endmacro %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ turn(m) }}{% else %}{{ m['content'] }}<|im_end|>"
    "{{ '\n' }}{% endif %}{% endfor %}"
)
# As Qwen3 and DeepSeek do: only the last turn has its reasoning, and the prompt opens it.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>{% endif %}{{ m['content'] }}<|im_end|>"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
WORDS = ["fox", "Äpfel", "日本", "🙂", "the lazy dog", "{{ x }}", "</s>", " 12", "x\n\n", "<b>"]


def random_chat(seed: int) -> list[dict[str, str]]:
    generator = np.random.default_rng(seed)

    def text() -> str:
        return "".join(generator.choice(WORDS, generator.integers(0, 6)))

    messages = [{"role": "system", "content": text()}] if seed % 2 else []
    for _ in range(generator.integers(1, 4)):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return messages


@pytest.fixture(scope="module")
def tokenizer(bpe):
    return open_tokenizer(str(bpe))


@pytest.fixture(scope="module")
def hf_tokenizer(bpe):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(bpe)


def tokenize(source, tokenizer, messages, **options):
    template = ChatTemplate(source, "test", tokenizer.special_tokens)
    return tokenize_chat(template, tokenizer, messages, **options)


@pytest.mark.parametrize("seed", range(6))
def test_marked_template_equals_transformers(seed, tokenizer, hf_tokenizer):
    messages = random_chat(seed)
    expected = hf_tokenizer.apply_chat_template(
        messages,
        chat_template=MARKED,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    chat = tokenize(MARKED, tokenizer, messages)
    assert chat.ids.tolist() == expected["input_ids"]
    assert chat.mask.astype(int).tolist() == expected["assistant_masks"]
    assert chat.ids.dtype == np.int32
    assert chat.mask.dtype == bool


@pytest.mark.parametrize("seed", range(6))
def test_unmarked_template_by_prefixes_of_ids(seed, tokenizer, hf_tokenizer):
    messages = random_chat(seed)

    def ids_of(part, prompt):
        return hf_tokenizer.apply_chat_template(
            part, chat_template=CHATML, add_generation_prompt=prompt, return_dict=True
        )["input_ids"]

    ids = ids_of(messages, False)
    mask = [0] * len(ids)
    end_of_turn = hf_tokenizer.convert_tokens_to_ids("<|im_end|>")
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = len(ids_of(messages[:turn], True)), len(ids_of(messages[: turn + 1], 0))
            stop = stop - ids[:stop][::-1].index(end_of_turn)
            mask[start:stop] = [1] * (stop - start)
    chat = tokenize(CHATML, tokenizer, messages)
    assert chat.ids.tolist() == ids
    assert chat.mask.astype(int).tolist() == mask


def test_marks_and_prefixes_agree(tokenizer):
    unmarked = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for seed in range(10):
        marked = tokenize(MARKED, tokenizer, random_chat(seed))
        plain = tokenize(unmarked, tokenizer, random_chat(seed))
        np.testing.assert_array_equal(marked.ids, plain.ids)
        np.testing.assert_array_equal(marked.mask, plain.mask)


def test_marks_inside_a_macro(tokenizer):
    """transformers counts such spans from where the macro began to run."""
    messages = random_chat(1)
    expected = tokenize(CHATML, tokenizer, messages)
    chat = tokenize(IN_MACRO, tokenizer, messages)
    np.testing.assert_array_equal(chat.ids, expected.ids)
    np.testing.assert_array_equal(chat.mask, expected.mask)


def test_long_conversation(tokenizer):
    messages = [
        {"role": role, "content": f"{number}"}
        for number in range(40)
        for role in ("user", "assistant")
    ]
    expected = "".join(f"{number}<|im_end|>" for number in range(40))
    chat = tokenize(CHATML, tokenizer, messages)
    assert chat.ids[chat.mask].tolist() == tokenizer.encode_with_specials(expected)


@pytest.mark.parametrize("source", [MARKED, CHATML])
def test_turns_of_the_prompt_are_left_out(source, tokenizer):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "fox"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "dog"},
    ]
    chat = tokenize(source, tokenizer, messages, first_turn=3)
    learned = chat.ids[chat.mask].tolist()
    assert learned == tokenizer.encode_with_specials("dog<|im_end|>")


def test_only_the_last_turn_where_earlier_reasoning_is_dropped(tokenizer, caplog):
    REPORTED.discard(REASONING)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "fox"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "dog"},
    ]
    with caplog.at_level(logging.WARNING):
        chats = [tokenize(REASONING, tokenizer, messages) for _ in range(2)]
    assert chats[0].ids[chats[0].mask].tolist() == tokenizer.encode_with_specials("dog<|im_end|>")
    assert len(caplog.records) == 1  # once for a template
    parts_at = len(
        tokenizer.encode_with_specials("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    )
    assert "assistant turn at message 1" in caplog.text
    token = tokenizer.id_to_token(tokenizer.encode_with_specials("fox")[0])
    assert f"part at token {parts_at}, {token!r}" in caplog.text


def test_last_turn_starts_where_it_differs_from_the_generation_prompt(tokenizer):
    source = CHATML.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"
    )
    assert source != CHATML
    chat = tokenize(
        source,
        tokenizer,
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<tea"}],
    )
    # "<think>" and "<tea" have tokens in common, which the assistant did not have to produce.
    whole = tokenizer.encode_with_specials("<tea<|im_end|>")
    prompt = tokenizer.encode_with_specials("<think>")
    shared = next(
        i for i, (one, other) in enumerate(zip(whole, prompt, strict=False)) if one != other
    )
    assert chat.ids[chat.mask].tolist() == whole[shared:]


def test_template_that_refuses_the_prompt_of_a_turn(tokenizer):
    source = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}" + CHATML
    with pytest.raises(UserError, match="assistant turn at message 1 cannot be told .* too short"):
        tokenize(
            source,
            tokenizer,
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        )


def test_template_that_leaves_a_marked_block(tokenizer):
    source = "{% for m in messages %}{% generation %}x{% break %}{% endgeneration %}{% endfor %}"
    with pytest.raises(UserError, match="leaves a {% generation %} block"):
        tokenize(source, tokenizer, random_chat(0))


def test_variables_reach_the_template(tokenizer):
    source = "{{ tools[0]['name'] }}{{ enable_thinking }}" + CHATML
    variables = {"tools": [{"name": "fox"}], "enable_thinking": False}
    chat = tokenize(source, tokenizer, random_chat(0), variables=variables)
    text = "foxFalse" + ChatTemplate(CHATML, "test").render(random_chat(0))
    assert chat.ids.tolist() == tokenizer.encode_with_specials(text)


NEWLINE = "{{ '\n' }}"  # after a block, a plain one is dropped
START, STOP = "{% generation %}", "{% endgeneration %}"
HEAD = "{% for m in messages %}### {{ m.role }}:\n{% if m.role == 'assistant' %}{% generation %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}### assistant:\n{% endif %}"
OTHER = "{% else %}{{ m.content }}\n{% endif %}"
LAST = "{% if loop.last and not add_generation_prompt %}\n</s>{% endif %}"
CALLS = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>"
    "{% endfor %}"
)
# What a template without tags has to train on, as a template with them says.
SHAPES = {
    "plain": f"{HEAD}{{{{ m.content }}}}\n{STOP}{OTHER}{TAIL}",
    "no newline": f"{HEAD}{{{{ m.content }}}}{STOP}{OTHER}{TAIL}",
    "text ends turns": f"{HEAD}{{{{ m.content }}}}\n---\n\n{STOP}{OTHER}{TAIL}",
    "eos": f"{HEAD}{{{{ m.content }}}}</s>{STOP}{NEWLINE}{OTHER}{TAIL}",
    "eos and text": f"{HEAD}{{{{ m.content }}}}</s>{STOP}{NEWLINE}---\n{OTHER}{TAIL}",
    "two special": f"{HEAD}{{{{ m.content }}}}<|im_end|></s>{STOP}{NEWLINE * 2}{OTHER}{TAIL}",
    "reasoning": f"{HEAD}{{% if m.reasoning_content %}}<think>{{{{ m.reasoning_content }}}}</think>"
    f"{{% endif %}}{{{{ m.content }}}}\n{STOP}{OTHER}{TAIL}",
    "calls": f"{HEAD}{CALLS}\n{STOP}{OTHER}{TAIL}",
    "calls and eos": f"{HEAD}{CALLS}<|im_end|>{STOP}{NEWLINE}{OTHER}{TAIL}",
    "end of the text": f"{HEAD}{{{{ m.content }}}}<|im_end|>{LAST}{STOP}{NEWLINE}{OTHER}{TAIL}",
}
TOOL_CALLS = [{"type": "function", "function": {"name": "fox", "arguments": {}}}]
SHAPED_CHATS = [
    [("user", "a"), ("assistant", "fox")],
    [("system", "s"), ("user", "a"), ("assistant", "fox"), ("user", "b"), ("assistant", "dog\n")],
    [
        ("user", "a</s>"),
        ("assistant", "<think>tea</think>hot"),
        ("user", ""),
        ("assistant", "</s>"),
    ],
    [("user", "a"), ("assistant", "x</think>"), ("user", "b"), ("assistant", "<think>y")],
    [("user", "a"), ("assistant", "So", "Hm."), ("user", "b"), ("assistant", "Yes", "Hm")],
    [("user", "a"), ("assistant", "", "", TOOL_CALLS), ("tool", "5"), ("assistant", "<think>5")],
    [("user", "a"), ("assistant", "I"), ("assistant", "do</think>")],
]


def shaped_chat(turns):
    names = ("role", "content", "reasoning_content", "tool_calls")
    return [dict(zip(names, turn, strict=False)) for turn in turns]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """(native, transformers') whose tags of reasoning and calls are special tokens."""
    transformers = pytest.importorskip("transformers")
    folder = write_bpe(tmp_path_factory.mktemp("tagged") / "bpe")
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    hf.add_special_tokens({"additional_special_tokens": tags})
    hf.save_pretrained(folder)
    return open_tokenizer(str(folder)), hf


@pytest.mark.parametrize("turns", SHAPED_CHATS, ids=range(len(SHAPED_CHATS)))
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_templates_equal_their_generation_tags(shape, turns, tagged):
    tokenizer, hf = tagged
    messages = shaped_chat(turns)
    expected = hf.apply_chat_template(
        messages,
        chat_template=SHAPES[shape],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    chat = tokenize(SHAPES[shape].replace(START, "").replace(STOP, ""), tokenizer, messages)
    assert chat.ids.tolist() == expected["input_ids"]
    assert chat.mask.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "tiktoken", "byte"])
def test_offsets_are_those_of_the_text(kind, paths):
    tokenizer = open_tokenizer(paths[kind])
    for text in ("", "fox", "<s>Äpfel und 日本 🙂</s>12  dog", "a</s>"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode_with_specials(text)
        assert sorted(offsets) == offsets
        covered = {index for start, end in offsets for index in range(start, end)}
        assert covered == set(range(len(text)))
        for token, (start, end) in zip(ids, offsets, strict=True):
            decoded = tokenizer.decode([token]).strip()
            if token in tokenizer.special_ids:
                assert tokenizer.id_to_token(token) == text[start:end]
            elif "�" not in decoded:
                assert decoded in text[start:end]
