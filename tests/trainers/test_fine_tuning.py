"""Fine-tuning: the number of steps of epochs, evaluation, FLOPs of what is computed."""

import json
import re

import jax
import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.common.trees import merge_dicts
from maxtext.models.counts import forward_flops_per_token
from maxtext.trainers.build import build_run_context
from maxtext.trainers.trainable import select

BYTES = ("tokenizer_path=byte", "vocab_size=259", "max_target_length=24", "per_device_batch_size=2")
ROWS = [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(7)]


@pytest.fixture
def rows(tmp_path):
    """The overrides that name the training and the evaluation file."""
    for name in ("train", "eval"):
        text = "\n".join(map(json.dumps, ROWS if name == "train" else ROWS[:3]))
        (tmp_path / f"{name}.jsonl").write_text(text)
    return (
        *BYTES, "use_sft=1", "sft_train_on_completion_only=true", "packing=false",
        "dataset_type=grain", "grain_file_type=jsonl", "enable_data_shuffling=false",
        f"grain_train_files={tmp_path}/train.jsonl", f"grain_eval_files={tmp_path}/eval.jsonl",
        "grain_worker_count=0", "grain_worker_count_eval=0", "learning_rate=0.01",
        "learning_rate_final_fraction=0", "warmup_steps_fraction=0", "lr_schedule_type=wsd",
        "wsd_decay_steps_fraction=1", "wsd_decay_style=linear",
    )  # fmt: skip


@pytest.mark.slow
def test_steps_and_schedule_are_those_of_the_epochs(run_training, rows):
    """Two epochs of seven rows are seven batches of two, and a linear decay over seven steps."""
    run = run_training(*rows, "num_epoch=2", "steps=-1", "eval_interval=7")
    assert run.error is None
    records = [record for record in run.records if "loss" in record]
    rates = [0.01 * (1 - step / 7) for step in range(7)]
    np.testing.assert_allclose([record["learning_rate"] for record in records], rates, rtol=1e-5)
    assert run.result.summary["stopped"] == "all steps done"
    # Prompt, completion and end token without the last target; only the completion is learned.
    lengths = [sum(map(len, row.values())) for row in ROWS[:2]]
    assert records[0]["computed_tokens"] == sum(length + 1 for length in lengths)
    assert records[0]["total_weights"] == sum(len(row["completion"]) + 1 for row in ROWS[:2])
    check_accuracy(run)


@pytest.mark.slow
def test_steps_repeat_data_that_does_not_fill_a_batch(run_training, rows):
    """Packed, the seven rows are less than one row of a batch of eight."""
    keys = dict(override.split("=", 1) for override in rows)
    keys |= {"packing": "true", "per_device_batch_size": "8", "steps": "2"}
    keys["max_target_length"] = "512"
    run = run_training(*(f"{key}={value}" for key, value in keys.items()))
    assert run.error is None
    assert run.result.summary["stopped"] == "all steps done"


def check_accuracy(run):
    """eval_mean_token_accuracy is that of the logits of the rows, one by one."""
    correct = total = 0
    context, weights = run.result.context, run.result.state.weights
    model = context.template.bind(weights)
    for row in ROWS[:3]:
        prompt = [1, *(byte + 3 for byte in row["prompt"].encode())]
        ids = np.array([*prompt, *(byte + 3 for byte in row["completion"].encode()), 2])
        logits = model(ids[None, :-1], np.arange(len(ids) - 1)[None])[0]
        predicted = np.argmax(logits, axis=-1)[len(prompt) - 1 :]
        correct += int(np.sum(predicted == ids[len(prompt) :]))
        total += len(ids) - len(prompt)
    record = next(record for record in run.records if "eval_loss" in record)
    assert record["eval_mean_token_accuracy"] == pytest.approx(correct / total, abs=1e-6)


PAIRS = ("use_dpo=true", "packing=false")
# Of TINY: query and out 16·32 each, key and value 16·16 each, MLP 3·16·32; head 16·41.
LAYER = 2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32
RANK_2 = 2 * (2 * (16 + 32) + 2 * (16 + 16) + 3 * (16 + 32))


@pytest.mark.parametrize(
    ("overrides", "weight_products", "passes"),
    [
        ((), 0, 3),
        (("lora_rank=2",), 3 * RANK_2 - LAYER - 16 * 41, 3),
        (PAIRS, 0, 4),
        ((*PAIRS, "precompute_reference_logps=true"), 0, 3),
        ((*PAIRS, "lora_rank=2"), 3 * RANK_2 - LAYER - 16 * 41, 4),
        (("trainable_parameters_mask=['mlp']",), -(LAYER - 3 * 16 * 32) - 16 * 41, 3),
    ],
)
def test_flops_are_those_computed(configure, overrides, weight_products, passes):
    """Three forward passes, without the gradients of frozen weights, and one of the reference."""
    context = build_run_context(configure(*overrides))
    expected = passes * forward_flops_per_token(context.config) + 2 * weight_products
    assert context.flops_per_token == pytest.approx(expected, rel=1e-12)


def test_xla_counts_the_flops_of_adapters(configure):
    """Less than a full step by the weight gradients of the base; XLA also counts element-wise work
    and the whole square of attention."""
    words = ("base_emb_dim=128", "base_num_query_heads=4", "head_dim=32", "base_mlp_dim=512",
             "vocab_size=1024", "max_target_length=32", "opt_type=sgd")  # fmt: skip
    counted = {}
    for overrides in ((), ("lora_rank=2",)):
        context = build_run_context(configure(*words, *overrides))

        def loss(trained, frozen, batch, objective=context.objective):
            weights = merge_dicts(trained, frozen)
            return objective.losses(weights, None, batch, None, np.int32(0)).sums["lm_loss"]

        weights = context.template.weights
        parts = [select(weights, context.trained, keep=keep) for keep in (True, False)]
        lowered = jax.jit(jax.grad(loss)).lower(*parts, context.abstract_batch(8))
        flops = lowered.compile().cost_analysis()["flops"] / (8 * 32)
        counted[overrides] = (flops, context.flops_per_token)
    (full, expected_full), (adapted, expected_adapted) = counted.values()
    assert (full - adapted) / (expected_full - expected_adapted) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("lines", "overrides", "message"),
    [
        (
            ['{"a": "x", "b": "y"}'] * 4,
            (),
            "the columns a, b are no form of a row",
        ),
        (["{"] * 4, (), "line . is not|line .: invalid JSON"),
        (['{"prompt": "x", "completion": ""}'] * 4, (), "line .: column completion is empty"),
        ([], (), "are empty"),
        (ROWS, ("max_target_length=2",), "no row with a token to train on"),
        (ROWS, ("lora_rank=2", "lora_target_modules=[q_porj]"), "did you mean q_proj"),
        (ROWS, ("lora_restore_path=/nowhere",), "/nowhere has no adapter_config.json"),
        (
            ROWS,
            ("lora_rank=2", "student_params_to_update=[mlp/wi_0/weight]"),
            "nothing would be trained",
        ),
    ],
)
def test_bad_rows_and_adapters_are_configuration_errors(
    run_training, rows, tmp_path, lines, overrides, message
):
    """Exit code 2, before anything is written."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "train.jsonl").write_text(text)
    names = {override.partition("=")[0] for override in overrides}
    kept = [override for override in rows if override.partition("=")[0] not in names]
    run = run_training(*kept, *overrides, "steps=-1")
    assert isinstance(run.error, ConfigError)
    assert re.search(message, str(run.error))
    assert (run.records, run.summary) == ([], None)
