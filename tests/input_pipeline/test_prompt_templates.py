"""Prompts of reinforcement learning: templates of questions, functions of the user, and media."""

import json

import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.input_pipeline.encode_rows import PromptEncoder
from maxtext.input_pipeline.formats import UnusableRecord
from maxtext.input_pipeline.interface import Split
from maxtext.models.configuration import load
from tests.tokenizers.tiny import write_bpe

TEMPLATE = {
    "SYSTEM_PROMPT": "Think in {reasoning_start_token}{reasoning_end_token}.",
    "TEMPLATE": "{system_prompt}\n{question} \\boxed{}",
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """(overrides) -> the encoder of training prompts."""
    folder = write_bpe(tmp_path_factory.mktemp("tokenizer") / "bpe")

    def make(*overrides):
        common = [
            f"tokenizer_path={folder}", "vocab_size=512", "use_grpo=true", "dataset_type=hf",
            "num_generations=2", "decode_sampling_strategy=weighted", "num_test_batches=0",
            "max_prefill_predict_length=256", "max_target_length=300",
        ]  # fmt: skip
        config = load(None, [*common, *overrides], environ={}, devices=Devices(1))
        return PromptEncoder(config, Split.TRAIN)

    return make


def write_json(path, value):
    path.write_text(json.dumps(value))
    return f"chat_template_path={path}"


def test_question_stands_in_the_template(encoder, tmp_path):
    prompts = encoder(write_json(tmp_path / "t.json", TEMPLATE), "reasoning_start_token=<think>")
    content = "Think in <think></reasoning>.\n2+2? \\boxed{}"
    rendered = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    expected = prompts.tokenizer.encode_with_specials(rendered)
    for record in ({"question": "2+2?"}, {"prompt": "2+2?"}):
        prompt = prompts.prepare(record)
        assert prompt.record["prompt"] == [{"role": "user", "content": content}]
        assert prompt.ids.tolist() == expected


def test_data_template_replaces_that_of_chat_template_path(encoder, tmp_path):
    data, chat = tmp_path / "data.json", tmp_path / "chat.json"
    data.write_text(json.dumps({"TEMPLATE": "Solve: {question}"}))
    chat.write_text(json.dumps({"chat_template": "<{{ messages[0].content }}>"}))
    prompts = encoder(f"data_template_path={data}", f"chat_template_path={chat}")
    expected = prompts.tokenizer.encode_with_specials("<Solve: 2+2?>")
    assert prompts.prepare({"question": "2+2?"}).ids.tolist() == expected
    with pytest.raises(ConfigError, match="data_template_path=.*no TEMPLATE"):
        encoder(f"data_template_path={chat}")
    with pytest.raises(ConfigError, match="data_template_path=.*there is no such file"):
        encoder(f"data_template_path={tmp_path}/absent.json")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"TEMPLATE": "no place"}, "TEMPLATE has no {question}"),
        ({"TEMPLATE": 3}, "TEMPLATE is no text"),
        ({"TEMPLATE": "{question}", "SYSTEM_PROMPT": []}, "SYSTEM_PROMPT is no text"),
    ],
)
def test_templates_without_a_question(encoder, tmp_path, entries, message):
    with pytest.raises(ConfigError, match=message):
        encoder(write_json(tmp_path / "t.json", entries))


def test_chat_templates_get_the_texts_that_rewards_look_for(encoder):
    source = "{{ messages[0].content }}{{ reasoning_start_token }}{{ solution_end_token }}"
    prompts = encoder(f"chat_template={source}", "solution_end_token=</a>")
    expected = prompts.tokenizer.encode_with_specials("2+2?<reasoning></a>")
    assert prompts.prepare({"question": "2+2?"}).ids.tolist() == expected


PROCESSOR = """
def process_data(dataset_name, model_tokenizer, template_config, tmvp_config, x):
    text = template_config["TEMPLATE"] + x["body"] + tmvp_config.solution_start_token
    prompt = model_tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return {"prompts": prompt, "question": x["body"], "answer": dataset_name}
"""


def test_function_of_the_user_makes_rows(encoder, tmp_path):
    (tmp_path / "mine.py").write_text(PROCESSOR)
    template = write_json(tmp_path / "t.json", {"TEMPLATE": "Solve: {question} "})
    path = f"dataset_processor_path={tmp_path}/mine.py"
    prompts = encoder(path, template, "dataset_name=gsm8k")
    prompt = prompts.prepare({"body": "2+2?"})
    rendered = "<|im_start|>user\nSolve: {question} 2+2?<answer><|im_end|>\n<|im_start|>assistant\n"
    assert prompt.record == {"prompt": rendered, "question": "2+2?", "answer": "gsm8k"}
    # A text begins as texts of this vocabulary do.
    assert prompt.ids.tolist() == [1, *prompts.tokenizer.encode_with_specials(rendered)]
    with pytest.raises(UnusableRecord, match="mine.py raised KeyError: 'body'"):
        prompts.prepare({"question": "2+2?"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(x): return x\n", "no attribute 'process_data'"),
        ("1 / 0\n", "cannot be imported: ZeroDivisionError"),
        (None, "there is no file"),
    ],
)
def test_files_without_the_function(encoder, tmp_path, source, message):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=f"dataset_processor_path=.*{message}"):
        encoder(f"dataset_processor_path={tmp_path}/mine.py")


def test_function_returns_a_prompt(encoder, tmp_path):
    (tmp_path / "mine.py").write_text("def process_data(*arguments):\n    return {'text': 'a'}\n")
    prompts = encoder(f"dataset_processor_path={tmp_path}/mine.py")
    with pytest.raises(UnusableRecord, match="no record with the column prompts"):
        prompts.prepare({"question": "2+2?"})


def test_prompts_with_images_are_refused(encoder):
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": "cat.png"}]
    with pytest.raises(UnusableRecord, match="message 0 has a part of type 'image'"):
        encoder().prepare({"prompt": [{"role": "user", "content": parts}]})
