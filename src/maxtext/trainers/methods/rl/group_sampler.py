"""Groups of completions: sampled by the engine, and scored by the reward functions of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.input_pipeline import Batch
from maxtext.input_pipeline.interface import RECORD
from maxtext.tokenizers import Tokenizer
from maxtext.trainers.losses.advantages import advantages, degenerate_groups
from maxtext.trainers.methods.rl.agents.agent import (
    AgenticSampler,
    conversation_columns,
    conversation_metrics,
)
from maxtext.trainers.methods.rl.agents.environment import Row
from maxtext.trainers.methods.rl.rewards.functions import (
    RewardFunction,
    compute_rewards,
    total_rewards,
)
from maxtext.trainers.methods.rl.rollout import Rollout, Sampler, rollout_metrics, sample_seed
from maxtext.trainers.methods.rl.rollout_log import Clock

DEGENERATE_STEPS = 3
# Compiled: an accelerator takes 0.2 ms for each operation of its own, and the update waits.
compiled_advantages = jax.jit(advantages, static_argnames=("num_generations", "scale"))
compiled_degenerate_groups = jax.jit(degenerate_groups, static_argnames="num_generations")


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    columns: Row


@dataclass(frozen=True)
class SampledBatch:
    """The rollouts of the prompts of `step`, sampled with the weights after `version` updates."""

    step: int
    version: int
    rollouts: list[Rollout]
    metrics: dict[str, float]


@dataclass(frozen=True)
class GroupSampler:
    """Samples with the weights of the sampler. `agentic`: rollouts are conversations."""

    config: MaxTextConfig
    sampler: Sampler
    tokenizer: Tokenizer
    rewards: Sequence[RewardFunction]
    stop_token_ids: tuple[int, ...]
    agentic: AgenticSampler | None = None

    @property
    def num_requests(self) -> int:
        """The completions that are sampled at a time."""
        prompts = self.config.rollout_micro_batch_size
        prompts = prompts if prompts > 0 else self.config.batch_size
        return min(prompts, self.config.batch_size) * self.config.num_generations

    def sample(
        self, prompts: Sequence[Prompt], step: int, version: int, clock: Clock
    ) -> SampledBatch:
        """num_generations rollouts of each prompt, in order, with their rewards."""
        rollouts = self.generate(prompts, step)
        clock.stop("rollout")
        repeated = [each for each in prompts for _ in range(self.config.num_generations)]
        completions = [rollout.text(self.tokenizer) for rollout in rollouts]
        names = list(dict.fromkeys(name for each in repeated for name in each.columns))
        columns = {name: [each.columns.get(name) for each in repeated] for name in names}
        columns |= conversation_columns(rollouts)
        rewards = compute_rewards(self.rewards, columns.pop("prompt"), completions, columns)
        total = total_rewards(self.rewards, rewards)
        clock.stop("reward")
        group_advantages = np.asarray(
            compiled_advantages(total, self.config.num_generations, scale=self.config.scale_rewards)
        )
        scored = [
            replace(
                rollout,
                step=step,
                prompt=prompt.columns["prompt"],
                completion=completion,
                rewards={name: float(values[row]) for name, values in rewards.items()},
                reward=float(total[row]),
                advantage=float(group_advantages[row]),
            )
            for row, (prompt, completion, rollout) in enumerate(
                zip(repeated, completions, rollouts, strict=True)
            )
        ]
        metrics = rollout_metrics(rollouts) | conversation_metrics(rollouts)
        metrics |= reward_metrics(scored, self.config.num_generations)
        return SampledBatch(step, version, rollouts=scored, metrics=metrics)

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Rollout]:
        rows = [prompt.columns for prompt in prompts for _ in range(self.config.num_generations)]
        requests = [
            request
            for index, prompt in enumerate(prompts)
            for request in self.group(prompt, step, index)
        ]
        limit = self.num_requests
        return [
            rollout
            for start in range(0, len(requests), limit)
            for rollout in self.complete(
                rows[start : start + limit], requests[start : start + limit]
            )
        ]

    def complete(
        self, rows: Sequence[Row], requests: Sequence[GenerationRequest]
    ) -> Sequence[Rollout]:
        """The rollout of each request, for a row with these columns."""
        if self.agentic is None:
            return self.sampler.generate(requests)
        with self.sampler.lease():
            return self.agentic.run(self.sampler, rows, requests)

    def group(self, prompt: Prompt, step: int, index: int) -> list[GenerationRequest]:
        """num_generations requests of a prompt, which is the `index`-th of its step."""
        params = SamplingParams.from_config(
            self.config,
            max_new_tokens=self.config.max_target_length - len(prompt.ids),
            stop=tuple(self.config.stop_strings or ()),
            stop_token_ids=self.stop_token_ids,
            n=self.config.num_generations,  # the completions of a group share their prompt's blocks
            logprobs=0,
        )
        seeds = [
            sample_seed(self.config.data_shuffle_seed, step, index, number)
            for number in range(self.config.num_generations)
        ]
        return [GenerationRequest(prompt.ids, params.with_valid(seed=seed)) for seed in seeds]


def read_prompts(batch: Batch) -> list[Prompt]:
    lengths = (batch["inputs_segmentation"] != 0).sum(axis=1)
    return [
        Prompt(ids[:length].tolist(), record)
        for ids, length, record in zip(batch["inputs"], lengths, batch[RECORD], strict=True)
    ]


def reward_metrics(scored: Sequence[Rollout], num_generations: int) -> dict[str, float]:
    """Means over the completions that are scored; `reward_std` is that of the groups."""
    rewards = np.array([each.reward for each in scored]).reshape(-1, num_generations)
    values = np.array([each.advantage for each in scored])
    metrics = {"reward": mean(rewards)}
    deviations = [np.std(group[~np.isnan(group)], ddof=1) for group in rewards if count(group) > 1]
    metrics["reward_std"] = float(np.mean(deviations)) if deviations else 0.0
    for name in scored[0].rewards:
        metrics[f"rewards/{name}"] = mean(np.array([each.rewards[name] for each in scored]))
    is_degenerate = np.asarray(compiled_degenerate_groups(values, num_generations))
    return metrics | {"groups/degenerate": float(is_degenerate.mean())}


class RewardWatch:
    """Warns when the rewards of DEGENERATE_STEPS steps in a row give no gradient, and again
    after every doubling."""

    def __init__(self) -> None:
        self.steps = 0  # in a row

    def add(self, metrics: Mapping[str, float]) -> None:
        """`metrics`: those of `reward_metrics`."""
        self.steps = self.steps + 1 if metrics["groups/degenerate"] == 1 else 0
        periods, rest = divmod(self.steps, DEGENERATE_STEPS)
        if rest or periods.bit_count() != 1:
            return
        if math.isnan(metrics["reward"]):
            problem = "every reward is nan, so no completion is scored"
        else:
            problem = "the completions of every prompt have equal rewards, so all advantages are 0"
        LOGGER.warning(
            "the rewards of %d steps in a row give no gradient: %s; look at rollouts.jsonl "
            "and at the reward functions",
            self.steps,
            problem,
        )


def count(values: np.ndarray) -> int:
    return int((~np.isnan(values)).sum())


def mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if count(values) else float("nan")
