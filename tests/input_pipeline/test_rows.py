"""Rows of fine-tuning as token ids and masks, compared with transformers and TRL."""

import json
import types

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.derive import Devices
from maxtext.configs.sources import HERE
from maxtext.input_pipeline.encode_rows import PairEncoder, encode_pair, encode_row
from maxtext.input_pipeline.formats import encode_example
from maxtext.input_pipeline.formats.example import decode_example
from maxtext.input_pipeline.instruction_data_processing import math_qa_formatting
from maxtext.input_pipeline.interface import Split
from maxtext.input_pipeline.row_forms import Remark
from maxtext.models.configuration import load
from tests.tokenizers.tiny import CHATML, write_bpe

USER = {"role": "user", "content": "the fox?"}
ASSISTANT = {"role": "assistant", "content": "brown, 日本"}
CHAT = [USER, ASSISTANT]
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}" + CHATML


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def hf_tokenizer(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def configured(folder):
    def configure(*overrides, completion_only=True):
        common = [f"tokenizer_path={folder}", "vocab_size=512", "packing=false"]
        if "use_dpo=true" not in overrides:
            common += ["use_sft=true", f"sft_train_on_completion_only={completion_only}"]
        return load(None, [*common, *overrides], environ={}, devices=Devices(1))

    return configure


@pytest.fixture(scope="module")
def expected(hf_tokenizer):
    """Ids of a conversation, and the mask of a last assistant turn, by prefixes of ids."""

    def encode(messages, **options):
        def ids_of(part, prompt):
            return hf_tokenizer.apply_chat_template(
                part, add_generation_prompt=prompt, return_dict=True, **options
            )["input_ids"]

        ids, start = ids_of(messages, False), len(ids_of(messages[:-1], True))
        newline = 1  # after <|im_end|>
        return ids, [0] * start + [1] * (len(ids) - start - newline) + [0] * newline

    return encode


def as_lists(row):
    return row.ids.tolist(), row.mask.astype(int).tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": np.array(CHAT, object)},
        {"messages": json.dumps(CHAT), "text": "not this", "prompt": "nor this"},
        {"messages": [USER | {"tool_calls": None}, ASSISTANT | {"tool_calls": None}]},
        {
            "conversations": [
                {"from": "human", "value": USER["content"]},
                {"from": "gpt", "value": ASSISTANT["content"]},
            ]
        },
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": ASSISTANT},
        {"prompt": json.dumps([USER]), "completion": json.dumps([ASSISTANT])},
        {"question": USER["content"], "answer": ASSISTANT["content"]},
        {"instruction": USER["content"], "output": ASSISTANT["content"]},
        {"instruction": USER["content"], "input": "", "output": ASSISTANT["content"]},
        {"instruction": USER["content"], "input": None, "output": ASSISTANT["content"]},
    ],
)
def test_forms_of_a_conversation(row, configured, expected):
    assert as_lists(encode_row(row, configured())) == expected(CHAT)
    everything = encode_row(row, configured(completion_only=False))
    assert as_lists(everything) == (expected(CHAT)[0], [1] * len(expected(CHAT)[0]))


def test_instruction_with_input(configured, expected):
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    messages = [{"role": "user", "content": "add\n\n1 2"}, {"role": "assistant", "content": "3"}]
    assert as_lists(encode_row(row, configured())) == expected(messages)


def test_only_assistant_turns_of_a_completion(configured, hf_tokenizer, expected):
    prompt, completion = [*CHAT, USER], [ASSISTANT, USER, ASSISTANT]
    row = encode_row({"prompt": prompt, "completion": completion}, configured())
    ids, last = expected(prompt + completion)
    assert row.ids.tolist() == ids
    turn = hf_tokenizer("brown, 日本<|im_end|>", add_special_tokens=False)["input_ids"]
    assert row.ids[row.mask].tolist() == turn * 2  # not that of the prompt
    assert row.mask.astype(int).tolist()[-len(turn) - 1 :] == last[-len(turn) - 1 :]


def test_texts_have_special_tokens_around_them(configured, hf_tokenizer):
    question, answer = "Q: fox? A: ", "dog"
    ids = [*hf_tokenizer(question + answer)["input_ids"], hf_tokenizer.eos_token_id]
    start = len(hf_tokenizer(question)["input_ids"])
    row = {"prompt": question, "completion": answer}
    mask = [0] * start + [1] * (len(ids) - start)
    assert as_lists(encode_row(row, configured())) == (ids, mask)
    assert as_lists(encode_row({"text": question + answer}, configured())) == (ids, [1] * len(ids))
    ended = row | {"completion": answer + "</s>"}
    assert as_lists(encode_row(ended, configured())) == (ids, mask)
    bare = encode_row(row, configured("add_bos=false", "add_eos=false"))
    assert as_lists(bare) == (ids[1:-1], mask[1:-1])


def test_completion_starts_at_the_token_that_merges_with_the_prompt(configured, hf_tokenizer):
    """The prompt ends within "Ġfo" of " fox"."""
    whole, prompt = (hf_tokenizer(text)["input_ids"] for text in ("a fox", "a f"))
    shared = next(
        i for i, pair in enumerate(zip(whole, prompt, strict=False)) if len(set(pair)) > 1
    )
    assert shared < len(prompt)
    row = encode_row({"prompt": "a f", "completion": "ox"}, configured())
    assert row.mask.astype(int).tolist() == [0] * shared + [1] * (len(whole) + 1 - shared)


def test_tools_and_variables_reach_the_template(configured, hf_tokenizer, expected):
    tools = [{"name": "search", "parameters": None}]
    row = {
        "messages": CHAT,
        "tools": json.dumps(tools),
        "chat_template_kwargs": {"mood": "hot tea"},
    }
    options = {"chat_template": TOOLS, "tools": tools, "mood": "hot tea"}
    config = configured(f"chat_template={TOOLS}")
    assert as_lists(encode_row(row, config)) == expected(CHAT, **options)
    empty = row | {"tools": None, "chat_template_kwargs": None}
    assert as_lists(encode_row(empty, config)) == expected(CHAT, chat_template=TOOLS)


def test_call_without_content_is_encoded_as_by_transformers(configured, expected):
    call = {"type": "function", "function": {"name": "fox", "arguments": {}}}
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert as_lists(encode_row(row, configured())) == expected(row["messages"])


def test_columns_that_the_user_names(configured, expected):
    row = {"dialogue": CHAT, "query": "fox", "reply": "dog", "messages": [USER], "text": "tea"}
    dialogue = encode_row(row, configured("train_data_columns=[dialogue]"))
    assert as_lists(dialogue) == expected(CHAT)
    two = encode_row(row, configured("train_data_columns=[query,reply]"))
    assert as_lists(two) == as_lists(
        encode_row({"prompt": "fox", "completion": "dog"}, configured())
    )
    text = encode_row(row, configured("train_data_columns=[text]"))
    assert as_lists(text) == as_lists(encode_row({"text": "tea"}, configured()))
    with pytest.raises(UserError, match="column 'texts' is missing; there are dialogue, query"):
        encode_row(row, configured("train_data_columns=[texts]"))
    with pytest.raises(ConfigError, match="name the columns of one form of rows"):
        encode_row(row, configured("train_data_columns=[a,b,c]"))


def test_remarks(configured):
    def remarks(messages, *overrides):
        return encode_row({"messages": messages}, configured(*overrides)).remarks

    assert remarks(CHAT) == ()
    assert remarks([USER]) == (Remark.NOT_TRAINED_ON,)
    assert remarks([USER, {"role": "system", "content": "x"}, ASSISTANT]) == (
        Remark.SYSTEM_NOT_FIRST,
    )
    without_end = CHATML.replace("<|im_end|>", "")
    assert remarks(CHAT, f"chat_template={without_end}") == (Remark.END_NOT_TRAINED_ON,)
    content = "{{ message['content'] }}"
    marked = CHATML.replace(content, f"{{% generation %}}{content}{{% endgeneration %}}")
    assert marked != CHATML
    assert Remark.END_NOT_TRAINED_ON in remarks(CHAT, f"chat_template={marked}")


def test_truncation_keeps_the_start(configured, expected):
    ids, mask = expected(CHAT)
    length = len(ids) - 5
    row = encode_row({"messages": CHAT}, configured(f"max_target_length={length}"))
    assert as_lists(row) == (ids[: length + 1], mask[: length + 1])  # `length` targets
    assert row.remarks == (Remark.TRUNCATED,)
    first = mask.index(1)
    assert encode_row({"messages": CHAT}, configured(f"max_target_length={first}")).mask.sum() == 1
    short = encode_row({"messages": CHAT}, configured(f"max_target_length={first - 1}"))
    assert short.remarks == (Remark.NOT_TRAINED_ON,)


BAD_ROWS = {
    "no form": ({"id": 1, "body": "x"}, "columns id, body are no form of a row: expected messages"),
    "not JSON": ({"messages": "hello"}, "column messages is text that is not JSON"),
    "not a list": ({"messages": 3}, "column messages has a value of type int"),
    "no messages": ({"messages": []}, "has no messages"),
    "role": ({"messages": [{"role": "bot", "content": "x"}]}, "message 0 .* role 'bot': expected"),
    "from": ({"conversations": [{"from": "bing", "value": "x"}]}, "is from 'bing': expected human"),
    "content": ({"messages": [USER, {"role": "assistant"}]}, "message 1 .* has no content"),
    "empty": ({"prompt": "a", "completion": ""}, "column completion is empty"),
    "empty answer": ({"question": "a", "answer": ""}, "column answer is empty"),
    "two kinds": ({"prompt": "a", "completion": [ASSISTANT]}, "a text and messages: use one kind"),
    "number": ({"text": 3}, "column text has a value of type int instead of text"),
    "tools": ({"messages": CHAT, "tools": "[{"}, "column tools is text that is not JSON"),
    "tools of a kind": ({"messages": CHAT, "tools": 3}, "column tools has a value of type int"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_raise(name, configured):
    row, said = BAD_ROWS[name]
    with pytest.raises(UserError, match=said):
        encode_row(row, configured())


def test_template_that_refuses_a_row(configured):
    source = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('no user') }}{% endif %}" + CHATML
    )
    with pytest.raises(UserError, match="refuses .* no user"):
        encode_row({"messages": [ASSISTANT]}, configured(f"chat_template={source}"))


def test_conversation_needs_a_template(configured):
    config = configured().model_copy(update={"tokenizer_path": "byte"})
    with pytest.raises(ConfigError, match="tokenizer byte has no chat template"):
        encode_row({"messages": CHAT}, config)


def test_columns_of_examples_are_bytes(configured, expected):
    record = decode_example(encode_example({"messages": json.dumps(CHAT), "text": "x"}))
    assert isinstance(record["messages"], bytes)
    assert as_lists(encode_row(record, configured())) == expected(CHAT)


# Formatting functions.


def add_user(row, role="user"):
    return {"messages": [{"role": role, "content": row["ask"]}, ASSISTANT]}


def fails(row):
    raise KeyError("ask")


def with_templates(row, template_config):
    return {"text": template_config["PROMPT_TEMPLATE"].format(**row)}


def test_formatting_function(configured, expected, tmp_path):
    path = f"formatting_func_path={__name__}."
    row = {"ask": USER["content"]}
    assert as_lists(encode_row(row, configured(f"{path}add_user"))) == expected(CHAT)
    kwargs = "formatting_func_kwargs={role: tool}"
    with_role = encode_row(row, configured(f"{path}add_user", kwargs))
    assert as_lists(with_role) == expected([USER | {"role": "tool"}, ASSISTANT])
    (tmp_path / "mine.py").write_text("def f(row):\n    return {'text': row['ask']}\n")
    text = encode_row(row, configured(f"formatting_func_path={tmp_path}/mine.py:f"))
    assert as_lists(text) == as_lists(encode_row({"text": USER["content"]}, configured()))
    (tmp_path / "templates.json").write_text(json.dumps({"PROMPT_TEMPLATE": "Q: {ask}"}))
    kwargs = f"formatting_func_kwargs={{template_path: {tmp_path}/templates.json}}"
    text = encode_row(row, configured(f"{path}with_templates", kwargs))
    assert as_lists(text) == as_lists(encode_row({"text": "Q: the fox?"}, configured()))


def test_bad_formatting_functions_raise(configured, tmp_path):
    for value, said in {
        "nowhere.f": "cannot be imported: No module named 'nowhere'",
        f"{__name__}.nothing": "cannot be imported: .*nothing",
        f"{__name__}.CHAT": "is list and no function",
        "f": "names no function",
        f"{tmp_path}/no.py:f": "there is no file",
    }.items():
        with pytest.raises(ConfigError, match=said):
            encode_row({}, configured(f"formatting_func_path={value}"))
    with pytest.raises(UserError, match="fails raised KeyError: 'ask'"):
        encode_row({}, configured(f"formatting_func_path={__name__}.fails"))
    kwargs = "formatting_func_kwargs={template_path: nowhere.json}"
    with pytest.raises(ConfigError, match="template_path=nowhere.json is no file"):
        encode_row({}, configured(f"formatting_func_path={__name__}.with_templates", kwargs))


def test_math_qa_formatting():
    """MaxText's examples of the same function."""
    example = {"question": " What is 2 + 2?", "answer": "Because 2 and 2 make 4.\n ## 4"}
    completion = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"
    templates = {
        "PROMPT_TEMPLATE": "This is a question: {question}",
        "COMPLETION_TEMPLATE": completion,
        "REASONING_ANSWER_SEPARATOR": "##",
    }
    user, assistant = math_qa_formatting(example, templates)["messages"]
    assert user == {"role": "user", "content": "This is a question: What is 2 + 2?"}
    answer = "<reasoning>\nBecause 2 and 2 make 4.\n</reasoning>\n<answer>\n4\n</answer>"
    assert assistant == {"role": "assistant", "content": answer}
    with pytest.raises(ConfigError, match="PROMPT_TEMPLATE has no placeholder {question}"):
        math_qa_formatting(example, {"PROMPT_TEMPLATE": "x"})
    with pytest.raises(ValueError, match="has '##' 0 times"):
        math_qa_formatting({"question": "a", "answer": "b"}, templates)


# Preference pairs.

OTHER = {"role": "assistant", "content": "tea"}
PAIRS = {
    "messages": {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
    "implicit prompt": {"chosen": CHAT, "rejected": [USER, OTHER]},
    "several turns": {"chosen": [*CHAT, *CHAT], "rejected": [*CHAT, USER, OTHER]},
    "texts": {"prompt": "the fox? ", "chosen": "dog", "rejected": "hot tea"},
    "merging": {"prompt": "a f", "chosen": "ox", "rejected": "ly"},
    "ended": {"prompt": "the fox? ", "chosen": "dog</s>", "rejected": "hot tea"},
}


@pytest.mark.slow
def test_pairs_equal_trl(configured, hf_tokenizer):
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    datasets = pytest.importorskip("datasets")
    arguments = types.SimpleNamespace(
        dataset_num_proc=None, max_length=None, truncation_mode="keep_start"
    )
    for name, row in PAIRS.items():
        (reference,) = trainer._prepare_dataset(
            types.SimpleNamespace(_tokenizer=hf_tokenizer),
            datasets.Dataset.from_list([row]),
            hf_tokenizer,
            arguments,
            "train",
        )
        pair = encode_pair(row, configured("use_dpo=true"))
        for side in ("prompt", "chosen", "rejected"):
            assert getattr(pair, side).tolist() == reference[f"{side}_ids"], name


def test_texts_that_contain_the_prompt(configured):
    config = configured("use_dpo=true")
    three = encode_pair(PAIRS["texts"], config)
    two = encode_pair({"chosen": "the fox? dog", "rejected": "the fox? hot tea"}, config)
    for side in ("prompt", "chosen", "rejected"):
        np.testing.assert_array_equal(getattr(two, side), getattr(three, side))


def test_columns_of_a_preset_are_no_choice_of_the_user(folder, configured):
    """The preset names prompt, chosen and rejected."""
    keys = [f"tokenizer_path={folder}", "vocab_size=512"]
    preset = load(HERE / "dpo.yml", keys, environ={}, devices=Devices(1))
    pair = encode_pair({"chosen": "the fox? dog", "rejected": "the fox? hot tea"}, preset)
    expected = encode_pair(PAIRS["texts"], configured("use_dpo=true"))
    assert pair.chosen.tolist() == expected.chosen.tolist()
    named = load(
        HERE / "dpo.yml", [*keys, "train_data_columns=[good,bad]"], environ={}, devices=Devices(1)
    )
    other = encode_pair({"good": "the fox? dog", "bad": "the fox? hot tea", "chosen": "x"}, named)
    assert other.chosen.tolist() == expected.chosen.tolist()


def test_prompt_that_messages_repeat(configured):
    config = configured("use_dpo=true")
    expected = encode_pair(PAIRS["messages"], config)
    for prompt in (USER["content"], [USER]):
        pair = encode_pair(PAIRS["implicit prompt"] | {"prompt": prompt}, config)
        assert pair.prompt.tolist() == expected.prompt.tolist()
        assert pair.chosen.tolist() == expected.chosen.tolist()


def test_lengths_of_pairs(configured):
    row = PAIRS["texts"]
    whole = encode_pair(row, configured("use_dpo=true"))
    sizes = [len(getattr(whole, side)) for side in ("prompt", "chosen", "rejected")]
    fits = sizes[0] + max(sizes[1:]) - 1  # targets
    pair = encode_pair(row, configured("use_dpo=true", f"max_target_length={fits}"))
    assert pair.remarks == ()
    assert len(pair.prompt) == sizes[0]
    short = encode_pair(row, configured("use_dpo=true", "max_target_length=8"))
    assert short.prompt.tolist() == whole.prompt.tolist()[-4:]
    assert short.chosen.tolist() == whole.chosen.tolist()[:5]
    assert short.rejected.tolist() == whole.rejected.tolist()[:5]
    assert short.remarks == (Remark.PROMPT_TRUNCATED, Remark.TRUNCATED)
    set_length = encode_pair(row, configured("use_dpo=true", "max_prompt_length=2"))
    assert set_length.prompt.tolist() == whole.prompt.tolist()[-2:]
    assert set_length.chosen.tolist() == whole.chosen.tolist()


def test_pairs_that_truncation_makes_equal_are_dropped_and_reported(configured):
    config = configured("use_dpo=true", "max_target_length=8")
    equal = {"prompt": "a", "chosen": "the same start, then yes", "rejected": "the same start, no"}
    encoder = PairEncoder(config, Split.TRAIN)
    pairs = [encoder.prepare(row) for row in (equal, equal | {"rejected": "another start"})]
    assert [pair.remarks for pair in pairs] == [(Remark.CUT_EQUAL,), (Remark.TRUNCATED,)]
    assert encoder.encode(pairs) == pairs[1:]
    assert encode_pair(equal, configured("use_dpo=true", "max_target_length=64")).remarks == ()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"chosen": CHAT, "rejected": CHAT}, "chosen has no message after the common prompt"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "column chosen is empty"),
        ({"prompt": "a", "chosen": "b"}, "are no form of a row: expected chosen, rejected"),
        ({"chosen": "b", "rejected": CHAT}, "a text and messages: use one kind"),
        ({"prompt": [USER], "chosen": "b", "rejected": "c"}, "prompt has messages, but"),
    ],
)
def test_bad_pairs_raise(row, said, configured):
    with pytest.raises(UserError, match=said):
        encode_pair(row, configured("use_dpo=true"))
