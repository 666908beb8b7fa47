"""Reinforcement learning: its update against torch, and whole runs."""

import dataclasses
import json
import math
import shutil
from itertools import islice
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
import transformers

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.sources import HERE, from_python
from maxtext.inference.sampling.params import SamplingParams
from maxtext.trainers import tune
from maxtext.trainers.build import build_run_context
from maxtext.trainers.configuration import load_run
from maxtext.trainers.data_loader import open_train_streams
from maxtext.trainers.methods.rl import rollout
from maxtext.trainers.methods.rl.group_sampler import RewardWatch, reward_metrics
from maxtext.trainers.methods.rl.rewards.answers import RewardKeys
from maxtext.trainers.methods.rl.rollout import Rollout
from maxtext.trainers.methods.rl.rollout_log import Clock, RolloutLog, SpanLog
from maxtext.trainers.methods.rl.rollout_step import check_agreement, log_rollout
from tests.support.distillation import save_llama
from tests.support.grpo import BYTES, ROWS, RUN, rollouts_of, share_of_low_bytes


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder, layers=1, embed_dim=16, seed=0, vocab_size=BYTES)
    return folder


def torch_loss(model, reference, rollouts, beta):
    """GRPO's loss of on-policy rollouts: the ratio is 1, and its gradient that of the logps."""
    total = 0.0
    for each in rollouts:
        ids = torch.tensor([each["prompt_ids"] + each["token_ids"]])
        first = len(each["prompt_ids"])

        def logps(model, ids=ids, first=first):
            found = torch.log_softmax(model(ids).logits[0, :-1], -1)
            return found.gather(1, ids[0, 1:, None])[first - 1 :, 0]

        policy = logps(model)
        ratio = torch.exp(policy - policy.detach())
        d = logps(reference).detach() - policy
        total = total + (-ratio * each["advantage"] + beta * (torch.exp(d) - d - 1)).mean()
    return total / len(rollouts)


def test_update_equals_torch(base, tmp_path, light_compiler):
    """The rollouts of a step and their advantages, with the model of transformers."""
    run = tune.grpo(
        base,
        ROWS,
        rewards=[share_of_low_bytes],
        **RUN,
        base_output_directory=str(tmp_path),
        run_name="once",
        enable_checkpointing=False,
        steps=2,
        opt_type="sgd",
        learning_rate=0.05,
        lr_schedule_type="wsd",
        wsd_decay_steps_fraction=0,
        warmup_steps_fraction=0,
        grpo_beta=0.1,
        degenerate_group_masking=False,
    )
    model, reference = (
        transformers.LlamaForCausalLM.from_pretrained(base, attn_implementation="eager")
        for _ in range(2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rollouts = rollouts_of(run)
    assert len(rollouts) == 2 * 8
    for step, metrics in enumerate(run.metrics):
        sampled = [each for each in rollouts if each["step"] == step]
        loss = torch_loss(model, reference, sampled, beta=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), abs=2e-5)
        assert metrics["sampling/logp_difference_max"] < 1e-4
        rewards = np.array([each["reward"] for each in sampled])
        assert metrics["reward"] == pytest.approx(rewards.mean(), rel=1e-6)
        groups = rewards.reshape(2, 4)
        expected = (groups - groups.mean(1, keepdims=True)) / (
            groups.std(1, ddof=1, keepdims=True) + 1e-6
        )
        found = np.reshape([each["advantage"] for each in sampled], (2, 4))
        np.testing.assert_allclose(found, expected, atol=1e-4)
    probe = np.arange(1, 25).reshape(2, 12)
    with torch.no_grad():
        expected = model(torch.tensor(probe)).logits
    np.testing.assert_allclose(run.model.logits(probe), expected, atol=5e-5)


@pytest.fixture(scope="module")
def train(base, tmp_path_factory, light_compiler):
    folder = tmp_path_factory.mktemp("runs")

    def run(name, **keys):
        return tune.grpo(
            base,
            ROWS,
            rewards=[share_of_low_bytes],
            **RUN
            | dict(
                base_output_directory=str(folder),
                run_name=name,
                steps=6,
                num_iterations=2,
                learning_rate=0.01,
                checkpoint_period=3,
                async_checkpointing=False,
                decode_sampling_temperature=1.5,
                train_micro_batch_size=1,
                grpo_beta=0.02,
            )
            | keys,
        )

    return run


@pytest.mark.slow
def test_run_resumes_bit_for_bit_between_the_updates_of_a_batch(train):
    finished = train("once")
    kl = [row["kl"] for row in finished.metrics]
    assert kl[0] < 1e-5 < kl[-1]
    rollouts = rollouts_of(finished)
    assert {each["step"] for each in rollouts} == {0, 2, 4}
    copy = finished.folder.with_name("twice")
    shutil.copytree(finished.folder, copy)
    shutil.rmtree(copy / "checkpoints/6")
    resumed = train("twice")
    assert [row["step"] for row in resumed.metrics] == [3, 4, 5]
    for row, expected in zip(resumed.metrics, finished.metrics[3:], strict=True):
        names = ("loss", "kl", "clip_ratio/low", "clip_ratio/high", "grad_norm", "reward")
        names += ("reward_std", "groups/degenerate", "completions/mean_length")
        assert {name: row[name] for name in names} == {name: expected[name] for name in names}
    assert rollouts_of(resumed) == rollouts
    weights = (run.result.state.weights for run in (finished, resumed))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *weights))
    shutil.rmtree(copy / "checkpoints/6")
    (copy / "rollouts.jsonl").unlink()
    with pytest.raises(UserError, match="rollouts.jsonl has 0 of the 8 rollouts of step 2"):
        train("twice")


@pytest.mark.slow
def test_adapter_learns_a_reward(train):
    run = train(
        "adapter",
        steps=24,
        num_iterations=1,
        lora_rank=8,
        learning_rate=0.1,
        train_micro_batch_size=-1,
        decode_sampling_temperature=1.0,
        num_generations=8,
        loss_algo="gspo-token",
        grpo_beta=0.0,
        enable_checkpointing=False,
    )
    rewards = [row["reward"] for row in run.metrics]
    assert np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.1
    assert (run.folder / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_equal_rewards_teach_nothing(base):
    run = tune.grpo(
        base,
        ROWS,
        rewards=[lambda prompts, completions, **columns: [1.0] * len(completions)],
        **RUN,
        steps=1,
    )
    assert run.metrics[0]["groups/degenerate"] == 1.0
    assert run.metrics[0]["loss"] == run.metrics[0]["raw_grad_norm"] == 0.0


def test_disagreement_of_sampler_and_trainer_names_the_token():
    rollouts = [
        scored(0, 1.0, 0.0, token_ids=(5, 6), log_probs=(-1.0, -2.0)),
        scored(0, 1.0, 0.0, token_ids=(7,), log_probs=(-0.5,)),
    ]
    config = SimpleNamespace(dtype=SimpleNamespace(value="float32"), sampler_trainer_tolerance=None)
    positions = np.array([2, 1])  # prompts have two tokens: target 1 is the first sampled one
    check_agreement(config, rollouts, np.array([0.0019, -0.0019]), positions)
    for worst in (-0.1, math.nan):
        with pytest.raises(UserError, match="token 6, number 1 of completion 0"):
            check_agreement(config, rollouts, np.array([worst, 0.001]), positions)
    config.sampler_trainer_tolerance = 0.05
    with pytest.raises(UserError, match=r"-2 in the sampler and -2.1 in the trainer, more than"):
        check_agreement(config, rollouts, np.array([-0.1, 0.0]), positions)
    config.sampler_trainer_tolerance = 0.2
    check_agreement(config, rollouts, np.array([-0.1, 0.0]), positions)


def scored(step, reward, advantage, token_ids=(3,), log_probs=(-0.1,)):
    return Rollout(
        step=step,
        prompt=[{"role": "user", "content": "é"}],
        completion="x",
        finish_reason="end",
        rewards={"f": reward},
        reward=reward,
        advantage=advantage,
        prompt_ids=(1, 2),
        token_ids=token_ids,
        log_probs=log_probs,
        old_logps=(float(np.float32(-0.1)),),
    )


def test_metrics_leave_out_what_is_not_scored():
    group = [
        scored(0, 1.0, 0.0),
        scored(0, math.nan, 0.0),
        scored(0, 1.0, -1.0),
        scored(0, 3.0, 1.0),
    ]
    metrics = reward_metrics(group, 2)
    assert metrics["reward"] == metrics["rewards/f"] == pytest.approx(5 / 3)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2))
    assert metrics["groups/degenerate"] == 0.5


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((2.0, 2.0), "equal rewards"), ((math.nan, math.nan), "every reward is nan")],
)
def test_warns_of_steps_in_a_row_that_teach_nothing(rewards, reason, caplog, monkeypatch):
    """After 3 steps, then after 6 and 12; a step with an advantage counts from 0 again."""
    monkeypatch.setattr("maxtext.common.log.LOGGER.propagate", True)
    equal = reward_metrics([scored(0, reward, 0.0) for reward in rewards], 2)
    unequal = reward_metrics([scored(0, 1.0, 1.0), scored(0, 3.0, -1.0)], 2)
    watch, steps = RewardWatch(), []
    for step, metrics in enumerate([equal, equal, unequal, *[equal] * 12]):
        caplog.clear()
        watch.add(metrics)
        if caplog.messages:
            steps.append(step)
            assert reason in caplog.messages[0]
    assert steps == [5, 8, 14]


def test_log_of_rollouts_drops_steps_without_a_checkpoint(tmp_path):
    log = RolloutLog(str(tmp_path), 0)
    log.append([scored(0, 1.0, 0.5), scored(0, math.nan, 0.0)])
    log.append([scored(2, 1.0, 0.25)])
    resumed = RolloutLog(str(tmp_path), 2)
    assert resumed.read(0)[0] == scored(0, 1.0, 0.5)
    assert math.isnan(resumed.read(0)[1].reward)
    assert resumed.read(2) == []


def test_log_of_rollouts_drops_a_line_that_a_kill_cut_off(tmp_path):
    log = RolloutLog(str(tmp_path), 0)
    log.append([scored(0, 1.0, 0.5), scored(0, 2.0, 0.5)])
    log.path.write_text(log.path.read_text()[:-9])
    resumed = RolloutLog(str(tmp_path), 1)
    resumed.append([scored(1, 3.0, 0.5)])
    assert resumed.read(0) == [scored(0, 1.0, 0.5)]
    assert resumed.read(1) == [scored(1, 3.0, 0.5)]


def test_spans_of_steps_without_a_checkpoint_are_dropped(tmp_path):
    clock = Clock()
    clock.stop("rollout")
    for first_step in (0, 1):  # the second process does step 1 again
        log = SpanLog(str(tmp_path), first_step)
        for step in (1, 2) if first_step else (0, 1):
            log.append(step, clock)
    assert [json.loads(line)["step"] for line in log.path.open()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_generations": 1}, "at least 2"),
        ({"decode_sampling_strategy": "greedy"}, "decode_sampling_strategy=weighted"),
        ({"max_prefill_predict_length": 14}, "leaves no token"),
        ({"train_micro_batch_size": 3, "batch_size": 4}, "does not divide"),
        ({"gradient_accumulation_steps": 3}, "does not divide the 8 completions of a step"),
        ({"train_fraction": math.nan}, "train_fraction=nan"),
        (
            {"decode_sampling_strategy": "weighted", "decode_sampling_top_k": 5},
            "decode_sampling_top_k=5 does nothing",
        ),
        (
            {"decode_sampling_strategy": "topk", "decode_sampling_top_k": 5}
            | {"decode_sampling_nucleus_p": 0.5},
            "decode_sampling_nucleus_p=0.5 does nothing",
        ),
        ({"enable_rampup_batch_size": True}, "a step of use_grpo has batch_size prompts"),
        ({"use_sft": True}, "exclude each other"),
        ({"off_policy_steps": 1}, "off_policy_steps"),
    ],
)
def test_refused_configurations(base, keys, message):
    with pytest.raises(ConfigError, match=message):
        tune.grpo(base, ROWS, rewards=[share_of_low_bytes], **RUN | keys)


def test_rows_need_a_prompt(base):
    with pytest.raises(ConfigError, match="expected prompt; or messages"):
        tune.grpo(base, [{"text": "a"}], rewards=[share_of_low_bytes], **RUN)


def test_prompts_that_are_all_too_long(base):
    rows = [{"prompt": "a prompt of more than eight bytes"}]
    with pytest.raises(ConfigError, match="no prompt of at most max_prefill_predict_length=8"):
        tune.grpo(base, rows, rewards=[share_of_low_bytes], **RUN)


@pytest.mark.slow
def test_failing_reward_loses_no_update(base, tmp_path, light_compiler):
    calls = []

    def fragile(prompts, completions, **columns):
        calls.append(len(completions))
        if len(calls) == 2:
            return [1.0]
        return share_of_low_bytes(prompts, completions)

    keys = RUN | dict(
        base_output_directory=str(tmp_path),
        run_name="run",
        steps=3,
        num_epoch=2,
        grpo_beta=0.0,
        async_checkpointing=False,
    )
    with pytest.raises(UserError, match="fragile returned 1 rewards for 8 completions"):
        tune.grpo(base, ROWS, rewards=[fragile], **keys)
    resumed = tune.grpo(base, ROWS, rewards=[fragile], **keys)
    assert [row["step"] for row in resumed.metrics] == [1, 2]
    assert {each["step"] for each in rollouts_of(resumed)} == {0, 1, 2}


@pytest.mark.slow
def test_stale_weights_of_the_sampler_end_the_run(base, monkeypatch):
    """A sync that does nothing after the first."""
    kept = {}
    create = rollout.InferenceEngine

    def create_with_stale_weights(programs, weights, *args, **kwargs):
        kept.setdefault("weights", jax.tree.map(lambda leaf: leaf.copy(), weights))
        return create(programs, kept["weights"], *args, **kwargs)

    monkeypatch.setattr(rollout, "InferenceEngine", create_with_stale_weights)
    with pytest.raises(UserError, match="weight sync failed: the sampler has other values"):
        tune.grpo(base, ROWS, rewards=[share_of_low_bytes], **RUN, steps=2, learning_rate=1e-4)


def test_logged_rollout_has_the_answer(caplog):
    rollout = dataclasses.replace(scored(3, 1.0, 0.5), completion="So <answer>42</answer>.")
    with caplog.at_level("INFO", logger="maxtext"):
        log_rollout(rollout, RewardKeys.from_python())
    expected = ["step 3", "completion: So <answer>42</answer>.", "answer: 42", "rewards: f 1"]
    assert [line for line in caplog.messages[-1].splitlines() if line in expected] == expected


def test_truncation_of_the_distribution_chooses_the_strategy(base):
    top_k, top_p = {"decode_sampling_top_k": 5}, {"decode_sampling_nucleus_p": 0.5}
    strategies = [("weighted", {}), ("topk", top_k), ("nucleus", top_p)]
    for strategy, keys in [*strategies, ("composite", top_k | top_p)]:
        overrides = from_python({"load_parameters_path": str(base), **RUN, **keys})
        config = load_run(HERE / "grpo.yml", overrides, None)
        params = SamplingParams.from_config(config)
        assert config.decode_sampling_strategy.value == strategy
        assert params.top_k == keys.get("decode_sampling_top_k", 0)
        assert params.top_p == keys.get("decode_sampling_nucleus_p", 1.0)


def test_steps_are_those_of_the_batches(base):
    for keys, steps in (
        ({}, 4),
        ({"steps": -1}, 4),
        ({"train_fraction": 0.5}, 2),
        ({"train_fraction": 0.29, "num_batches": 100}, 58),
    ):
        settings = RUN | {"num_batches": 2, "num_iterations": 2, **keys}
        overrides = from_python({"load_parameters_path": str(base), **settings})
        assert load_run(HERE / "grpo.yml", overrides, None).steps == steps


def test_prompts_repeat_until_the_last_batch(base, tmp_path):
    """num_batches asks for more prompts than there are; a num_epoch that is set ends the data."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {
        "dataset_type": "grain",
        "grain_file_type": "jsonl",
        "grain_train_files": str(tmp_path / "rows.jsonl"),
        "grain_worker_count": 0,
    }
    for keys, batches in (({}, 50), ({"num_epoch": 2}, 2 * len(ROWS) // RUN["batch_size"])):
        settings = {"load_parameters_path": str(base), **RUN, **data, "num_batches": 50, **keys}
        context = build_run_context(load_run(HERE / "grpo.yml", from_python(settings), None))
        streams = open_train_streams(context)
        assert len(list(islice(streams, 50))) == batches
        streams.close()


@pytest.mark.slow
def test_keys_of_a_run(base, tmp_path, light_compiler):
    """Rewards of a file with weights, stop strings, truncated completions, spans and plots."""
    (tmp_path / "mine.py").write_text(
        "def length(prompts, completions, **columns):\n"
        "    return [len(text) for text in completions]\n"
        "async def first(prompts, completions, answer, **columns):\n"
        "    return [float(ord(text[:1] or ' ')) for text in completions]\n"
    )
    stops = [chr(code) for code in range(97, 123)]
    run = tune.grpo(
        base,
        ROWS,
        **RUN,
        base_output_directory=str(tmp_path),
        run_name="keys",
        enable_checkpointing=False,
        steps=1,
        reward_functions_path=str(tmp_path / "mine.py"),
        reward_functions=["length", "first"],
        reward_weights=[2.0, 0.5],
        scale_rewards="none",
        stop_strings=stops,
        mask_truncated=True,
        degenerate_group_masking=False,
        loss_agg_mode="sequence-mean",
        grpo_beta=0.0,
        enable_tunix_perf_metrics=True,
    )
    rollouts = rollouts_of(run)
    for each in rollouts:
        expected = 2 * each["rewards"]["length"] + 0.5 * each["rewards"]["first"]
        assert each["reward"] == pytest.approx(expected)
        if each["finish_reason"] == "stop":  # with the first token that has a small letter
            assert each["completion"][-1] in stops
            assert not set(each["completion"][:-1]) & set(stops)
    assert {each["finish_reason"] for each in rollouts} >= {"stop", "length"}
    rewards = np.reshape([each["reward"] for each in rollouts], (2, 4))
    advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()
    np.testing.assert_allclose([each["advantage"] for each in rollouts], advantages, atol=1e-4)
    lengths = np.array([len(each["token_ids"]) for each in rollouts])
    is_trained_on = np.array([each["finish_reason"] != "length" for each in rollouts])
    # On policy the ratio is 1: the loss is the mean of -A times the tokens, over these rows.
    loss = -(advantages * lengths)[is_trained_on].sum() / is_trained_on.sum()
    assert run.metrics[0]["loss"] == pytest.approx(loss, rel=1e-4)
    names = [json.loads(line)["name"] for line in (run.folder / "spans.jsonl").open()]
    assert names == ["sync", "rollout", "reward", "score", "prepare", "update"]
    assert (run.folder / "reward.png").is_file()
