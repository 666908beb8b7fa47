"""Rollouts that are sampled ahead: which weights sample them, and when they are trained on."""

import shutil
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.input_pipeline import BatchIterator
from maxtext.trainers import tune
from maxtext.trainers.hooks import TrainingFailed
from maxtext.trainers.methods.rl.group_sampler import SampledBatch
from maxtext.trainers.methods.rl.prompt_loader import Lookahead
from maxtext.trainers.methods.rl.rollout_log import Clock
from maxtext.trainers.methods.rl.rollout_step import GroupRolloutStep
from tests.support.distillation import save_llama
from tests.support.grpo import BYTES, ROWS, RUN, rollouts_of, share_of_low_bytes


class Numbers(BatchIterator):
    def __init__(self):
        self.position = 0

    def __next__(self):
        if self.position == 6:
            raise StopIteration
        self.position += 1
        return {"inputs": np.array([self.position])}

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]

    def reset(self):
        self.position = 0


def test_position_is_that_of_the_batches_taken():
    source = Lookahead(Numbers())
    numbers = [int(next(source)["inputs"][0]) for _ in range(2)]
    ahead = [int(batch["inputs"][0]) for batch in source.peek(3)]
    assert (numbers, ahead) == ([1, 2], [3, 4, 5])
    assert source.get_state() == {"position": 2}
    assert int(next(source)["inputs"][0]) == 3
    assert source.get_state() == {"position": 3}
    assert len(source.peek(9)) == 3
    source.set_state({"position": 1})
    assert int(next(source)["inputs"][0]) == 2


EMPTY = {"inputs": np.zeros((0, 1)), "inputs_segmentation": np.zeros((0, 1)), "record": []}


def fail(*args):
    raise UserError("no reward")


def test_old_batches_are_sampled_anew():
    """A step that finds batches of versions 3 and 7 at step 8, with at most two updates between."""
    sampled = []

    def sample(prompts, step, version, clock):
        sampled.append((step, version))
        return SampledBatch(step, version, rollouts=[], metrics={})

    step = object.__new__(GroupRolloutStep)
    step.step = 8
    step.error = None
    step.config = SimpleNamespace(off_policy_steps=2)
    step.context = SimpleNamespace(model_weights=lambda state: None)
    step.sampler = SimpleNamespace(
        synced=lambda weights, count: nullcontext(), release=lambda: None
    )
    step.group_sampler = SimpleNamespace(sample=sample, num_requests=1)
    old, young = (SampledBatch(8, version, rollouts=[], metrics={}) for version in (3, 7))
    step.queue = deque([old])
    assert step.take(None, [], Clock()).version == 8
    assert sampled == [(8, 8)]
    step.queue = deque([young])
    assert step.take(None, [], Clock()) is young
    assert sampled == [(8, 8)]
    # An error of sampling ahead ends the run in the next step, with the weights of the last.
    step.group_sampler = SimpleNamespace(sample=fail)
    step.sample_later([(10, EMPTY)], 8, Clock())
    with pytest.raises(TrainingFailed, match="no reward"):
        step.take(None, [], Clock())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder, layers=1, embed_dim=16, seed=0, vocab_size=BYTES)
    return folder


@pytest.fixture(scope="module")
def train(base, tmp_path_factory, light_compiler):
    folder = tmp_path_factory.mktemp("runs")

    def run(name, **keys):
        settings = RUN | dict(
            base_output_directory=str(folder),
            run_name=name,
            steps=4,
            num_epoch=2,
            learning_rate=0.02,
            warmup_steps_fraction=0.0,
            enable_checkpointing=False,
            use_agentic_rollout=True,
            grpo_beta=0.0,
        )
        return tune.grpo(base, ROWS, rewards=[share_of_low_bytes], **settings | keys)

    return run


@pytest.mark.slow
def test_rollouts_are_those_of_earlier_weights(train):
    ahead = train("ahead", off_policy_steps=1, steps=3)
    still = train("still", learning_rate=0.0, steps=2)  # the weights of step 0 sample both steps
    assert [row["policy/age_max"] for row in ahead.metrics] == [0, 1, 1]
    expected = rollouts_of(still)
    actual = rollouts_of(ahead)
    assert actual[: len(expected)] == expected
    differences = [row["sampling/logp_difference_max"] for row in ahead.metrics]
    assert differences[0] < 1e-4 < differences[1]
    assert {each["step"] for each in actual} == {0, 1, 2}


@pytest.mark.slow
def test_no_steps_ahead_are_the_plain_loop(train):
    """Bit for bit: rollouts, metrics and weights."""
    agentic = train("agentic", off_policy_steps=0, num_iterations=2)
    plain = train("plain", use_agentic_rollout=False, num_iterations=2)
    names = ("loss", "reward", "grad_norm", "clip_ratio/low", "sampling/logp_difference_max")
    rows = [[[row[name] for name in names] for row in run.metrics] for run in (agentic, plain)]
    assert rows[0] == rows[1]
    ids = [[each["token_ids"] for each in rollouts_of(run)] for run in (agentic, plain)]
    assert ids[0] == ids[1]
    weights = (run.result.state.weights for run in (agentic, plain))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *weights))


@pytest.mark.exhaustive
def test_run_resumes_with_new_rollouts_of_what_was_in_flight(train):
    keys = dict(enable_checkpointing=True, checkpoint_period=2, async_checkpointing=False)
    finished = train("once", off_policy_steps=2, **keys)
    copy = finished.folder.with_name("twice")
    shutil.copytree(finished.folder, copy)
    shutil.rmtree(copy / "checkpoints/4")
    resumed = train("twice", off_policy_steps=2, **keys)
    assert [row["step"] for row in resumed.metrics] == [2, 3]
    assert [row["policy/age_max"] for row in resumed.metrics] == [0, 1]
    once, twice = ([each["prompt"] for each in rollouts_of(run)] for run in (finished, resumed))
    assert once == twice


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_agentic_rollout": False, "off_policy_steps": 1}, "needs use_agentic_rollout=true"),
        ({"off_policy_steps": 1, "num_iterations": 2}, "less than the num_iterations=2 updates"),
        ({"off_policy_steps": -1}, "at least 0"),
    ],
)
def test_refused_configurations(train, keys, message):
    with pytest.raises(ConfigError, match=message):
        train("refused", **keys)
