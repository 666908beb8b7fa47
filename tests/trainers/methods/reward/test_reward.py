"""Reward models: against TRL's RewardTrainer, transformers' classifiers and PEFT, and in GRPO."""

import json
import types
from collections import defaultdict

import numpy as np
import pytest
import torch
import transformers

from maxtext.common.errors import ConfigError, UserError
from maxtext.inference.llm import LLM
from maxtext.models.hf_registry import MAPPINGS, classifier_name
from maxtext.trainers import tune
from maxtext.trainers.methods.reward.model import RewardModel

VOCABULARY, PADDING, RATE = 260, 259, 1e-2
KEYS = dict(
    tokenizer_path="byte",
    dtype="float32",
    weight_dtype="float32",
    matmul_precision="highest",
    attention="dot_product",
    scan_layers=False,
    remat_policy="none",
    per_device_batch_size=2,
    max_target_length=24,
    enable_data_shuffling=False,
    learning_rate=RATE,
    learning_rate_final_fraction=1.0,
    gradient_clipping_threshold=0.0,
    adam_b2=0.95,
    enable_tensorboard=False,
    steps=3,
)
PAIRS = [
    {"prompt": f"{i} is ", "chosen": "even" if i % 2 == 0 else "odd", "rejected": "red" + "!" * i}
    for i in range(6)
]
MARGINS = [0.5, -1.0, 0.0, 2.0, 0.25, 1.0]


def llama_config(**options):
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,  # large, so that scores differ
        attn_implementation="eager",
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model of transformers."""
    torch.manual_seed(0)
    config = llama_config(num_labels=1, pad_token_id=PADDING)
    folder = tmp_path_factory.mktemp("reward")
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("language")
    model = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=True))
    model.save_pretrained(folder)
    return folder


def torch_model(folder):
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, pad_token_id=PADDING
    )


def token_ids(row, side):
    pair = tune.encode_pair(row, tokenizer="byte")
    return pair["prompt"] + pair[side]


def trl_inputs(rows, margins=None):
    sequences = [token_ids(row, side) for side in ("chosen", "rejected") for row in rows]
    length = max(map(len, sequences))
    ids = torch.full((len(sequences), length), PADDING)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence)
    inputs = {"input_ids": ids, "attention_mask": (ids != PADDING).long()}
    return inputs if margins is None else inputs | {"margin": torch.tensor(margins)}


def train_with_trl(model, batches, coefficient, updates=True):
    """TRL's loss, its metrics, and the gradient norm of each AdamW step."""
    trl = pytest.importorskip("trl")
    accelerator = types.SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = types.SimpleNamespace(
        accelerator=accelerator,
        model=model,
        args=types.SimpleNamespace(center_rewards_coefficient=coefficient),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), 1e-8, weight_decay=0.0)
    records = defaultdict(list)
    for inputs in batches:
        loss = trl.RewardTrainer.compute_loss(trainer, model.train(), dict(inputs))
        loss.backward()
        gradients = [each.grad.norm() for each in model.parameters() if each.grad is not None]
        records["loss"].append(float(loss.detach()))
        records["raw_grad_norm"].append(float(torch.stack(gradients).norm()))
        if updates:
            optimizer.step()
        optimizer.zero_grad()
    return records | trainer._metrics["train"]


def torch_scores(model, sequences):
    with torch.no_grad():
        return [float(model.eval()(torch.tensor([ids])).logits) for ids in sequences]


@pytest.mark.slow
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_updates_equal_those_of_trl(folder, tmp_path, coefficient):
    has_margins = coefficient > 0
    rows = [
        row | {"margin": margin} if has_margins else row
        for row, margin in zip(PAIRS, MARGINS, strict=True)
    ]
    model = torch_model(folder)
    starts = range(0, len(PAIRS), 2)
    batches = [
        trl_inputs(PAIRS[i : i + 2], MARGINS[i : i + 2] if has_margins else None) for i in starts
    ]
    expected = train_with_trl(model, batches, coefficient or None)
    keys = KEYS | {"center_rewards_coefficient": coefficient}
    eval_file = tmp_path / "eval.jsonl"
    eval_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:2]))
    keys |= {"grain_eval_files": str(eval_file), "eval_interval": 3, "run_name": "it"}
    keys["metrics_file"] = str(tmp_path / "metrics.jsonl")
    run = tune.reward(folder, rows, base_output_directory=str(tmp_path), **keys)
    names = {
        "loss": "loss",
        "raw_grad_norm": "raw_grad_norm",
        "rewards/accuracies": "accuracy",
        "rewards/margins": "margin",
        "rewards/mean": "mean_reward",
    }
    for name, trl_name in names.items():
        actual = [metrics[name] for metrics in run.metrics]
        np.testing.assert_allclose(actual, expected[trl_name], rtol=1e-4, atol=1e-5, err_msg=name)
    evaluated = train_with_trl(model, batches[:1], coefficient or None, updates=False)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    last = next(record for record in records if "eval_loss" in record)
    for name in ("loss", "rewards/accuracies", "rewards/margins"):
        assert last[f"eval_{name}"] == pytest.approx(evaluated[names[name]][0], rel=1e-3, abs=1e-4)
    sequences = [token_ids(row, side) for row in PAIRS for side in ("chosen", "rejected")]
    saved = torch_model(run.folder / "reward_model")  # as transformers loads it
    np.testing.assert_allclose(
        torch_scores(saved, sequences), torch_scores(model, sequences), rtol=1e-3, atol=1e-4
    )
    resumed = RewardModel.load(run.folder, "byte", dtype="float32", matmul_precision="highest")
    own = resumed.score(
        [row["prompt"] for row in PAIRS for _ in range(2)],
        [row[side] for row in PAIRS for side in ("chosen", "rejected")],
    )
    np.testing.assert_allclose(own, torch_scores(saved, sequences), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_language_model_gets_a_new_head_that_adapters_train_in_full(language_model, tmp_path):
    peft = pytest.importorskip("peft")
    keys = KEYS | {"lora_rank": 4, "base_output_directory": str(tmp_path), "run_name": "it"}
    run = tune.reward(language_model, PAIRS, **keys)
    adapter = run.folder / "adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = transformers.LlamaForSequenceClassification.from_pretrained(
        language_model, num_labels=1, pad_token_id=PADDING
    )
    model = peft.PeftModel.from_pretrained(base, adapter)
    pairs = [trl_inputs([row]) for row in PAIRS[:2]]
    keys |= {
        "run_name": "second",
        "learning_rate": 0.0,
        "steps": 1,
        "lora_restore_path": str(adapter),
    }
    del keys["lora_rank"]
    again = tune.reward(language_model, PAIRS, **keys)
    with torch.no_grad():
        scores = [model(**inputs).logits[:, 0].numpy() for inputs in pairs]
    margins = [chosen - rejected for chosen, rejected in scores]
    assert again.metrics[0]["rewards/margins"] == pytest.approx(
        np.mean(margins), rel=1e-4, abs=1e-5
    )


@pytest.mark.slow
def test_scores_are_a_reward_of_grpo(folder, language_model, tmp_path):
    keys = {name: KEYS[name] for name in ("tokenizer_path", "dtype", "scan_layers", "attention")}
    run = tune.grpo(
        language_model,
        [{"prompt": row["prompt"]} for row in PAIRS[:2]],
        reward_model_path=str(folder),
        base_output_directory=str(tmp_path),
        num_generations=2,
        batch_size=2,
        num_batches=1,
        max_prefill_predict_length=8,
        max_target_length=14,
        matmul_precision="highest",
        enable_tensorboard=False,
        **keys,
    )
    lines = (run.folder / "rollouts.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    rewards = [each["rewards"]["reward_model"] for each in rollouts]
    rows = [
        {"prompt": each["prompt"], "chosen": each["completion"], "rejected": "?"}
        for each in rollouts
    ]
    expected = torch_scores(torch_model(folder), [token_ids(row, "chosen") for row in rows])
    np.testing.assert_allclose(rewards, expected, rtol=1e-4, atol=1e-5)


def test_conversations_are_scored_with_the_chat_template(folder):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    model = RewardModel.load(folder, "byte", chat_template=template, dtype="float32")
    messages = [{"role": "user", "content": "hi"}]
    text = "<user>hi<assistant>you"
    assert model.token_ids(messages, "you") == model.encoder.tokenizer.encode(text)


def test_reward_model_writes_no_text(folder):
    with pytest.raises(UserError, match="is a reward model"):
        LLM.load(folder, tokenizer_path="byte")


def test_language_model_is_no_reward_model(language_model):
    with pytest.raises(ConfigError, match="is a language model, not a reward model"):
        RewardModel.load(language_model, "byte")


def test_margin_must_be_a_number(folder):
    rows = [row | {"margin": "much"} for row in PAIRS]
    with pytest.raises(UserError, match="margin is 'much', and must be a number"):
        tune.reward(folder, rows, **KEYS)


def test_classes_are_those_of_transformers():
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    names = {mapping.model_type: classifier_name(mapping) for mapping in MAPPINGS}
    assert names == {model_type: CLASSES.get(model_type) for model_type in names}
