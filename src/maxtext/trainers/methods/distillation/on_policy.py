"""On-policy distillation: the completions of some batches are sampled instead of read.

With probability gkd_lambda the student samples the completions of a batch; with gkd_seq_kd, the
teacher samples those of the others. The seed and the step decide which batches, and every sampled
token, so that a resumed run goes on bit for bit.
"""

import time
from enum import Enum

import jax
import numpy as np

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.input_pipeline import Batch
from maxtext.trainers.data_loader import DeviceBatch
from maxtext.trainers.methods.distillation.objective import GKDObjective
from maxtext.trainers.methods.method import StepSetup
from maxtext.trainers.methods.rl.rollout import (
    Rollout,
    Sampler,
    rollout_metrics,
    sample_seed,
    stop_token_ids,
)
from maxtext.trainers.step import TrainState

MIXTURE_SEED = 0x676B64  # folded into the seed, so that samples and the choice are independent


class Origin(Enum):
    """Where the completions of a batch come from."""

    DATA = "data"
    STUDENT = "student"
    TEACHER = "teacher"


def batch_origin(config: MaxTextConfig, step: int) -> Origin:
    entropy = [config.data_shuffle_seed % 2**32, step, MIXTURE_SEED]
    if np.random.default_rng(entropy).random() < config.gkd_lambda:
        return Origin.STUDENT
    return Origin.TEACHER if config.gkd_seq_kd else Origin.DATA


class OnPolicyStep:
    """A train step that samples the completions of its batch first."""

    def __init__(self, setup: StepSetup):
        self.context = context = setup.context
        objective = context.objective
        assert isinstance(objective, GKDObjective)
        self.config = context.config
        self.train_step = setup.train_step
        self.data_loader = setup.data_loader
        self.step = setup.first_step
        self.stop_token_ids = stop_token_ids(self.config, setup.checkpoint)
        self.samplers = {
            Origin.STUDENT: Sampler(self.config, objective.model_template, context.rules)
        }
        if self.config.gkd_seq_kd:
            self.samplers[Origin.TEACHER] = Sampler(
                objective.teacher_config, objective.teacher_template, context.rules
            )

    def __call__(
        self, state: TrainState, batch: DeviceBatch, key: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array | float]]:
        origin = batch_origin(self.config, self.step)
        metrics = {"on_policy": float(origin is Origin.STUDENT)}
        if origin is not Origin.DATA:
            assert self.data_loader.host_batch is not None
            started = time.perf_counter()
            host_batch, rollouts = self.sample(origin, state, self.data_loader.host_batch)
            batch = self.data_loader.to_device(host_batch)
            metrics |= rollout_metrics(rollouts)
            metrics["rollout_seconds"] = time.perf_counter() - started
        self.step += 1
        state, step_metrics = self.train_step(state, batch, key)
        return state, step_metrics | metrics

    def sample(
        self, origin: Origin, state: TrainState, batch: Batch
    ) -> tuple[Batch, list[Rollout]]:
        """The batch with sampled completions, and these."""
        requests = completion_requests(self.config, batch, self.step, self.stop_token_ids)
        if not requests:
            return batch, []
        sampler = self.samplers[origin]
        with sampler.synced(self.weights_of(origin, state), len(batch["inputs"])):
            rollouts = sampler.generate(list(requests.values()))
        return replace_rows(batch, dict(zip(requests, rollouts, strict=True))), rollouts

    def weights_of(self, origin: Origin, state: TrainState) -> Tree:
        if origin is Origin.TEACHER:
            return state.reference
        return self.context.model_weights(state)


def prompt_lengths(batch: Batch) -> np.ndarray:
    """[rows]: the tokens before the last completion of each row, the last run of targets in the
    loss; 0 for a row without one."""
    is_trained_on = batch["targets_segmentation"] != 0
    before = np.pad(is_trained_on, ((0, 0), (1, 0)))[:, :-1]
    starts = is_trained_on & ~before
    length = is_trained_on.shape[1]
    last = length - np.argmax(starts[:, ::-1], axis=1)  # input t precedes target t
    return np.where(starts.any(axis=1), last, 0)


def completion_requests(
    config: MaxTextConfig, batch: Batch, step: int, stop_token_ids: tuple[int, ...]
) -> dict[int, GenerationRequest]:
    """A request for each row, by its index. Rows without a completion, and prompts that fill
    their row, have none."""
    requests = {}
    for row, length in enumerate(prompt_lengths(batch).tolist()):
        max_new_tokens = min(config.gkd_max_new_tokens, config.max_target_length - length)
        if not length or max_new_tokens < 1:
            continue
        params = SamplingParams.from_config(
            config,
            max_new_tokens=max_new_tokens,
            seed=sample_seed(config.data_shuffle_seed, step, row),
            stop_token_ids=stop_token_ids,
        )
        requests[row] = GenerationRequest(batch["inputs"][row, :length].tolist(), params)
    return requests


def replace_rows(batch: Batch, rollouts: dict[int, Rollout]) -> Batch:
    """The batch with rollouts in place of its rows of these indices."""
    fields = {name: field.copy() for name, field in batch.items()}
    for row, rollout in rollouts.items():
        for name, value in rollout.row(fields["inputs"].shape[1]).items():
            fields[name][row] = value
    return fields
