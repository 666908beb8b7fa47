"""Generalized knowledge distillation: its update against torch, and on-policy training."""

import shutil

import jax
import numpy as np
import pytest
import torch
import transformers

from maxtext.checkpoint.open import open_checkpoint
from maxtext.common.errors import ConfigError
from maxtext.configs.sources import HERE, from_python
from maxtext.models.configuration import load
from maxtext.trainers import tune
from maxtext.trainers.configuration import load_run
from maxtext.trainers.methods.distillation.on_policy import (
    Origin,
    batch_origin,
    completion_requests,
    prompt_lengths,
    replace_rows,
)
from maxtext.trainers.methods.rl.rollout import Rollout
from tests.support.distillation import (
    PROBE,
    RATE,
    Run,
    documents,
    save_llama,
)

BETA, TEMPERATURE = 0.3, 1.5
BYTES = 259  # ids of the byte tokenizer
ROWS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(12)]
ON_POLICY = dict(
    tokenizer_path="byte",
    use_sft=True,
    sft_train_on_completion_only=True,
    packing=False,
    use_gkd=True,
    gkd_lambda=0.7,
    gkd_beta=1.0,
    gkd_max_new_tokens=8,
    max_target_length=16,
    per_device_batch_size=6,
    num_epoch=100,
    dtype="float32",
    scan_layers=False,
    enable_tensorboard=False,
)


def jensen_shannon(student_logits, teacher_logits):
    """The divergence at each token, from probabilities; losses/test_trl.py compares with TRL."""
    s, t = (torch.softmax(x / TEMPERATURE, -1) for x in (student_logits, teacher_logits))
    m = BETA * t + (1 - BETA) * s
    return (BETA * t * (t / m).log() + (1 - BETA) * s * (s / m).log()).sum(-1)


@pytest.mark.slow
def test_update_equals_torch(models, packed, quickly):
    folders, _, teacher = models
    student = transformers.LlamaForCausalLM.from_pretrained(folders["student"])
    total, tokens = 0.0, 0
    for inputs, _, mask in documents(packed):
        with torch.no_grad():
            teacher_logits = teacher(inputs).logits
        total += (jensen_shannon(student(inputs).logits, teacher_logits) * mask).sum()
        tokens += int(mask.sum())
    loss = total / tokens
    loss.backward()
    torch.optim.SGD(student.parameters(), lr=RATE).step()
    run = Run(
        folders,
        "use_gkd=true", "gkd_lambda=0", f"gkd_beta={BETA}", "distill_alpha=0.5",
        f"distill_temperature={TEMPERATURE}", "num_vocab_tiling=2",
        quickly=quickly,
    )  # fmt: skip
    state, metrics = run.step(run.state(), packed)
    assert metrics["loss"] == metrics["divergence"] == pytest.approx(loss.item(), rel=1e-5)
    assert "distill_alpha" not in metrics
    with torch.no_grad():
        expected = student(torch.tensor(PROBE)).logits
    np.testing.assert_allclose(run.logits(state.weights, PROBE), expected, atol=2e-5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("student", "teacher")}
    save_llama(folders["student"], layers=1, embed_dim=16, seed=0, vocab_size=BYTES)
    save_llama(folders["teacher"], layers=2, embed_dim=24, seed=1, vocab_size=BYTES)
    return folders


@pytest.fixture(scope="module")
def config(folders):
    keys = ON_POLICY | {"teacher_overrides": {"load_parameters_path": str(folders["teacher"])}}
    return load(
        None,
        from_python(keys | {"load_parameters_path": str(folders["student"])}),
        environ={},
        model=open_checkpoint(folders["student"]).model_layer,
    )


def conversation_batch():
    """Rows with one completion, with two, with none, and with a prompt that fills the row."""
    trained_on = np.zeros((4, 8), np.int32)
    trained_on[0, 3:6] = trained_on[1, 1:2] = trained_on[1, 4:8] = trained_on[3, 7] = 1
    tokens = np.arange(10, 42, dtype=np.int32).reshape(4, 8)
    segments = np.ones((4, 8), np.int32)
    segments[0, 6:], segments[2] = 0, 0
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (4, 8)) * segments
    return {
        "inputs": tokens,
        "targets": tokens + 1,
        "inputs_position": positions,
        "targets_position": positions,
        "inputs_segmentation": segments,
        "targets_segmentation": trained_on,
    }


def test_prompt_ends_where_the_last_completion_begins():
    assert prompt_lengths(conversation_batch()).tolist() == [4, 5, 0, 8]


def test_requests_continue_prompts_with_seeds_of_their_own(config):
    config = config.model_copy(update={"max_target_length": 8, "gkd_max_new_tokens": 3})
    batch = conversation_batch()
    requests = completion_requests(config, batch, step=2, stop_token_ids=(2,))
    assert {row: request.prompt for row, request in requests.items()} == {
        0: [10, 11, 12, 13],
        1: [18, 19, 20, 21, 22],
    }
    assert {request.params.max_new_tokens for request in requests.values()} == {3}
    again = completion_requests(config, batch, step=3, stop_token_ids=(2,))
    seeds = {request.params.seed for request in [*requests.values(), *again.values()]}
    assert len(seeds) == 4
    rollout = Rollout((10, 11, 12, 13), (7, 2), log_probs=(), finish_reason="end")
    replaced = replace_rows(batch, {0: rollout})
    assert replaced["targets"][0].tolist() == [11, 12, 13, 7, 2, 0, 0, 0]
    assert replaced["targets_segmentation"][0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    for name, field in batch.items():
        np.testing.assert_array_equal(replaced[name][1:], field[1:])
    assert batch["targets"][0, 0] == 11  # the batch of the data is unchanged


def test_share_of_sampled_batches_is_lambda(config):
    third = config.model_copy(update={"gkd_lambda": 0.3})
    origins = [batch_origin(third, step) for step in range(2000)]
    assert origins.count(Origin.STUDENT) == pytest.approx(600, abs=75)  # 3.6 deviations
    assert set(origins) == {Origin.STUDENT, Origin.DATA}
    other = third.model_copy(update={"data_shuffle_seed": 1, "gkd_seq_kd": True})
    others = [batch_origin(other, step) for step in range(2000)]
    assert set(others) == {Origin.STUDENT, Origin.TEACHER}
    assert [x is Origin.STUDENT for x in others] != [x is Origin.STUDENT for x in origins]
    for share, origin in ((0.0, Origin.DATA), (1.0, Origin.STUDENT)):
        fixed = config.model_copy(update={"gkd_lambda": share})
        assert {batch_origin(fixed, step) for step in range(100)} == {origin}


@pytest.fixture(scope="module")
def train(folders, tmp_path_factory, light_compiler):
    """(run_name) -> a run. An adapter of the student is trained; it samples most batches, and the
    teacher the others."""
    base = tmp_path_factory.mktemp("runs")

    def run(name):
        return tune.distill(
            folders["student"],
            folders["teacher"],
            ROWS,
            **ON_POLICY,
            base_output_directory=str(base),
            run_name=name,
            steps=40,
            learning_rate=0.03,
            lora_rank=4,
            gkd_seq_kd=True,
            checkpoint_period=35,
            async_checkpointing=False,
        )

    return run


@pytest.fixture(scope="module")
def finished(train):
    return train("once")


@pytest.mark.slow
def test_student_comes_closer_to_its_teacher_on_its_own_completions(finished):
    sampled = [row for row in finished.metrics if row["on_policy"]]
    assert 20 <= len(sampled) < len(finished.metrics)
    assert {row["completions/max_length"] for row in finished.metrics} <= {*range(1, 9)}
    divergence = [row["divergence"] for row in sampled]
    assert np.mean(divergence[-5:]) < 0.9 * np.mean(divergence[:5])


@pytest.mark.slow
def test_stopped_run_resumes_bit_for_bit(finished, train):
    """The run that was never stopped continues from one of its checkpoints in another folder."""
    copy = finished.folder.with_name("twice")
    shutil.copytree(finished.folder, copy)
    shutil.rmtree(copy / "checkpoints/40")
    resumed = train("twice")
    assert [row["step"] for row in resumed.metrics] == [35, 36, 37, 38, 39]
    assert {row["on_policy"] for row in resumed.metrics} == {0.0, 1.0}
    names = ("loss", "on_policy", "total_weights", "completions/mean_length")
    for row, expected in zip(resumed.metrics, finished.metrics[35:], strict=True):
        assert {name: row[name] for name in names} == {name: expected[name] for name in names}
    weights = (run.result.state.weights for run in (finished, resumed))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *weights))


def test_truncation_of_the_distribution_needs_its_strategy():
    keys = {"use_gkd": True, "decode_sampling_top_k": 5}
    with pytest.raises(ConfigError, match="decode_sampling_top_k=5 does nothing"):
        load_run(HERE / "distill.yml", from_python(keys), None)
