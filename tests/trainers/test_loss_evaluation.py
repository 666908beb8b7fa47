"""Evaluation: the mean over all tokens of the evaluation data, computed here document by document
with torch.
"""

import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.trainers import train

torch = pytest.importorskip("torch")

LENGTH = 24
# Bytes b are the ids b + 3 between 1 and 2, and none of these is cut: each is shorter than a row.
DOCUMENTS = [
    "to be",
    "or not to be, that is",
    "the",
    "question:",
    "whether 'tis nobler",
    "i",
    "n the mind to suffer",
]
TEXT = (
    "dataset_type=grain", "grain_file_type=text", "tokenizer_path=byte", "vocab_size=259",
    f"max_target_length={LENGTH}", "per_device_batch_size=2", "eval_per_device_batch_size=2",
    "learning_rate=0.02", "grain_num_threads=2", "grain_num_threads_eval=2", "grain_worker_count=0",
    "grain_worker_count_eval=0",
)  # fmt: skip


@pytest.fixture
def text(tmp_path):
    """The overrides that name the training and the evaluation files."""
    for name, documents in {"train": ["once upon a time " * 40] * 2, "eval": DOCUMENTS}.items():
        (tmp_path / name).mkdir()
        for number, document in enumerate(documents):
            (tmp_path / name / f"{number}.txt").write_text(document)
    return (
        *TEXT,
        "use_truncation=false",
        f"grain_train_files={tmp_path}/train",
        f"grain_eval_files={tmp_path}/eval",
    )


@pytest.fixture
def mean_loss(quickly):
    return lambda run, documents: mean_loss_of(
        run.result.context.template, run.result.state.weights, documents, quickly
    )


def mean_loss_of(template, weights, documents, quickly):
    """Each document alone in its row, in float64 from the logits on."""
    rows = [[1, *(byte + 3 for byte in document.encode()), 2] for document in documents]
    inputs = np.zeros((len(rows), LENGTH), np.int32)
    for index, row in enumerate(rows):
        inputs[index, : len(row) - 1] = row[:-1]
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (len(rows), 1))
    score = quickly(lambda weights: template.bind(weights)(inputs, positions))
    logits = torch.tensor(np.asarray(score(weights)), dtype=torch.float64)
    losses = [
        torch.nn.functional.cross_entropy(
            logits[index, : len(row) - 1], torch.tensor(row[1:]), reduction="sum"
        )
        for index, row in enumerate(rows)
    ]
    return float(sum(losses)) / sum(len(row) - 1 for row in rows)


def evaluations(run):
    return {record["step"]: record["eval_loss"] for record in run.records if "eval_loss" in record}


def test_eval_loss_is_the_mean_over_all_tokens(run_training, text, mean_loss):
    run = run_training(*text, "eval_interval=3", "steps=6", "learning_rate_schedule_steps=50")
    eval_losses = evaluations(run)
    assert list(eval_losses) == [2, 5], "after every third step, under that step's number"
    expected = mean_loss(run, DOCUMENTS)
    assert eval_losses[5] == pytest.approx(expected, rel=1e-6)
    assert eval_losses[2] != eval_losses[5]
    assert run.summary["eval_loss"] == eval_losses[5]
    record = next(record for record in run.records if record.get("eval_loss") == eval_losses[5])
    assert record["eval_perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)
    assert len([record for record in run.records if "loss" in record]) == 6


def test_evaluation_begins_at_eval_start_step(run_training, text):
    overrides = (
        "eval_interval=2",
        "eval_start_step=3",
        "steps=7",
        "learning_rate_schedule_steps=50",
    )
    run = run_training(*text, *overrides)
    assert list(evaluations(run)) == [2, 4, 6], "after 3, 5 and 7 steps"


@pytest.mark.slow
def test_eval_steps_limits_the_batches(run_training, text, mean_loss):
    """One document a row, in order, two rows a batch: three batches are the first six documents."""
    overrides = ("packing=false", "num_epoch=20", "eval_steps=3", "eval_interval=2", "steps=2")
    run = run_training(*text, *overrides, "learning_rate_schedule_steps=50")
    expected = mean_loss(run, DOCUMENTS[:6])
    assert evaluations(run) == {1: pytest.approx(expected, rel=1e-6)}


@pytest.mark.parametrize(("target", "steps"), [(100.0, 2), (0.001, 6), (0.0, 6)])
def test_training_stops_at_the_target(run_training, text, target, steps):
    overrides = (
        "eval_interval=2",
        f"target_eval_loss={target}",
        "steps=6",
        "learning_rate_schedule_steps=50",
    )
    run = run_training(*text, *overrides)
    assert run.summary["steps"] == steps
    assert list(evaluations(run)) == list(range(1, steps, 2))
    if steps == 2:
        assert f"reached target_eval_loss {target}" in run.summary["stopped"]
    else:
        assert run.summary["stopped"] == "all steps done"


def test_no_evaluation_without_eval_interval(run_training, text):
    run = run_training(*text, "steps=2", "learning_rate_schedule_steps=50")
    assert evaluations(run) == {}
    assert run.summary["eval_loss"] is None


@pytest.mark.slow
def test_evaluation_has_no_dropout_and_no_z_loss(run_training, text, mean_loss):
    overrides = ("dropout_rate=0.5", "z_loss_multiplier=0.1", "eval_interval=2", "steps=2")
    run = run_training(*text, *overrides, "learning_rate_schedule_steps=50")
    expected = mean_loss(run, DOCUMENTS)
    assert evaluations(run) == {1: pytest.approx(expected, rel=1e-6)}


def test_eval_interval_needs_evaluation_data(configure, text):
    without = [override for override in text if not override.startswith("grain_eval_files")]
    with pytest.raises(
        ConfigError, match="eval_interval=2 needs evaluation data: set grain_eval_files"
    ):
        train.train(configure(*without, "eval_interval=2"))


def test_endless_evaluation_data_needs_eval_steps(configure):
    with pytest.raises(ConfigError, match="set eval_steps"):
        train.train(configure("eval_interval=2"))
