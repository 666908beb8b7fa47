"""The step of reinforcement learning: sample groups, score them, and update num_iterations times.

Each of batch_size prompts gets num_generations completions from the engine, on the weights of the
step. The first update computes the log-probabilities of the same tokens: where one differs from
that of the engine by more than a tolerance, the run ends. The seed, the step, the prompt and the
number of a completion decide its tokens, so that a resumed run goes on bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.open import Checkpoint
from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling_params import SamplingParams
from maxtext.input_pipeline import FIELDS, Batch
from maxtext.input_pipeline.interface import RECORD
from maxtext.tokenizers import load_tokenizer
from maxtext.trainers.agents.agent import (
    Agent,
    AgenticSampler,
    conversation_columns,
    conversation_metrics,
)
from maxtext.trainers.compile import lower
from maxtext.trainers.data_loader import DeviceBatch
from maxtext.trainers.grpo import (
    ADVANTAGES,
    IS_LEARNED,
    OLD_LOGPS,
    ROW_DIFFERENCES,
    ROW_INDEX,
    ROW_POSITIONS,
    SAMPLER_LOGPS,
    GroupRelativePolicy,
    needs_old_logps,
)
from maxtext.trainers.loop import TrainStep
from maxtext.trainers.losses.advantages import advantages, degenerate_groups
from maxtext.trainers.on_policy import rollout_metrics
from maxtext.trainers.prompt_loader import PromptLoader
from maxtext.trainers.rewards.functions import RewardFunction, compute_rewards, total_rewards
from maxtext.trainers.rollout import Rollout, sample_seed, stop_token_ids
from maxtext.trainers.rollout_devices import make_rollout_engine
from maxtext.trainers.rollout_log import RolloutLog, ScoredRollout
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.shardings import with_shardings
from maxtext.trainers.spans import Clock, SpanLog
from maxtext.trainers.step import TrainState

# The largest difference of a log-probability between the engine and the trainer, by dtype
TOLERANCE = {"float32": 2e-3}
TOLERANCE_16_BIT = 0.5
# The finish reasons of completions that a limit ended
TRUNCATED = ("length", "turns")


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    columns: dict[str, Any]


class GroupRolloutStep:
    """A train step that samples its batch first. `step`: the number of steps done."""

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        data_loader: PromptLoader,
        rewards: Sequence[RewardFunction],
        step: int,
        folder: str,
        checkpoint: Checkpoint | None,
        agent: Agent | None = None,
    ):
        objective = context.objective
        assert isinstance(objective, GroupRelativePolicy)
        self.context = context
        self.config = context.config
        self.objective = objective
        self.train_step = train_step
        self.data_loader = data_loader
        self.rewards = [*(agent.rewards if agent else ()), *rewards]
        self.step = step
        self.log = RolloutLog(folder, step)
        self.tokenizer = load_tokenizer(self.config)
        self.stop_token_ids = stop_token_ids(self.config, checkpoint)
        self.engine = make_rollout_engine(context)
        self.agentic = None
        if self.config.use_agentic_rollout:
            self.agentic = AgenticSampler(self.config, self.tokenizer, agent)
        self.score = compile_score(context) if needs_old_logps(self.config) else None
        self.spans = SpanLog(folder) if self.config.enable_tunix_perf_metrics else None
        self.rollouts: list[ScoredRollout] = []
        self.batch: DeviceBatch | None = None
        self.metrics: dict[str, float] = {}
        data_loader.step = step

    def __call__(
        self, state: TrainState, prompts: Batch, key: jax.Array
    ) -> tuple[TrainState, dict[str, Any]]:
        clock = Clock()
        first = self.step - self.step % self.config.num_iterations
        is_first_update = self.batch is None or first == self.step
        if is_first_update:
            logged = self.log.read(first) if first < self.step else []
            self.rollouts = logged or self.sample(state, read_prompts(prompts), clock)
            self.batch = self.prepare(self.rollouts)
            is_first_update = not logged
        assert self.batch is not None
        clock.stop("prepare")
        state, metrics = self.train_step(state, self.batch, key)
        differences = np.asarray(metrics.pop(ROW_DIFFERENCES))
        positions = np.asarray(metrics.pop(ROW_POSITIONS)).astype(int)
        if is_first_update:
            check_agreement(self.config, self.rollouts, differences, positions)
        clock.stop("update")
        metrics["sampling/logp_difference_max"] = np.abs(differences).max()
        if self.spans is not None:
            self.spans.append(self.step, clock)
        self.step += 1
        return state, metrics | self.metrics | clock.metrics()

    def sample(self, state: TrainState, prompts: list[Prompt], clock: Clock) -> list[ScoredRollout]:
        """The rollouts of this step, scored by the reward functions."""
        rollouts = self.generate(self.context.model_weights(state), prompts, clock)
        old_logps = self.compute_logps(state, rollouts)
        clock.stop("score")
        repeated = [each for each in prompts for _ in range(self.config.num_generations)]
        completions = [rollout.text(self.tokenizer) for rollout in rollouts]
        names = list(dict.fromkeys(name for each in repeated for name in each.columns))
        columns = {name: [each.columns.get(name) for each in repeated] for name in names}
        columns |= conversation_columns(rollouts)
        rewards = compute_rewards(self.rewards, columns.pop("prompt"), completions, columns)
        total = total_rewards(self.rewards, rewards)
        clock.stop("reward")
        group_advantages = np.asarray(
            advantages(total, self.config.num_generations, scale=self.config.scale_rewards)
        )
        scored = [
            ScoredRollout(
                step=self.step,
                prompt=prompt.columns["prompt"],
                completion=completion,
                finish_reason=rollout.finish_reason,
                rewards={name: float(values[row]) for name, values in rewards.items()},
                reward=float(total[row]),
                advantage=float(group_advantages[row]),
                prompt_ids=rollout.prompt_ids,
                token_ids=rollout.token_ids,
                log_probs=rollout.log_probs,
                old_logps=tuple(map(float, old_logps[row])),
                learned=rollout.learned,
            )
            for row, (prompt, completion, rollout) in enumerate(
                zip(repeated, completions, rollouts, strict=True)
            )
        ]
        self.log.append(scored)
        if self.config.rl:
            log_rollout(scored[0])
        self.metrics = rollout_metrics(rollouts) | conversation_metrics(rollouts)
        self.metrics |= reward_metrics(scored, self.config.num_generations)
        return scored

    def generate(self, weights: Any, prompts: list[Prompt], clock: Clock) -> list[Rollout]:
        """num_generations completions of each prompt, in order."""
        config = self.config
        requests = [
            self.request(prompt, index, number)
            for index, prompt in enumerate(prompts)
            for number in range(config.num_generations)
        ]
        rows = [prompt.columns for prompt in prompts for _ in range(config.num_generations)]
        limit = len(requests)
        if config.rollout_micro_batch_size > 0:
            limit = config.rollout_micro_batch_size * config.num_generations
        self.engine.sync(weights, min(limit, len(requests)))
        clock.stop("sync")
        try:
            return [
                rollout
                for start in range(0, len(requests), limit)
                for rollout in self.complete(
                    rows[start : start + limit], requests[start : start + limit]
                )
            ]
        finally:
            self.engine.release()
            clock.stop("rollout")

    def complete(
        self, rows: Sequence[dict[str, Any]], requests: Sequence[GenerationRequest]
    ) -> Sequence[Rollout]:
        """The rollout of each request, for a row with these columns."""
        if self.agentic is None:
            return self.engine.generate(requests)
        with self.engine.session() as session:
            return self.agentic.run(session, rows, requests)

    def request(self, prompt: Prompt, index: int, number: int) -> GenerationRequest:
        params = SamplingParams.from_config(
            self.config,
            max_new_tokens=self.config.max_target_length - len(prompt.ids),
            seed=sample_seed(self.config.data_shuffle_seed, self.step, index, number),
            stop=tuple(self.config.stop_strings or ()),
            stop_token_ids=self.stop_token_ids,
            logprobs=0,
        )
        return GenerationRequest(prompt.ids, params)

    def compute_logps(self, state: TrainState, rollouts: list[Rollout]) -> list[np.ndarray]:
        """Log-probabilities of the tokens of each completion under the trainer's model; empty if
        the loss does not need them."""
        if self.score is None:
            return [np.zeros(0, np.float32)] * len(rollouts)
        batch = rollout_fields(rollouts, self.config.max_target_length)
        values = np.asarray(self.score(state.weights, self.data_loader.to_device(batch).fields))
        is_sampled = batch["targets_segmentation"] != 0
        return [row[mask] for row, mask in zip(values, is_sampled, strict=True)]

    def prepare(self, scored: list[ScoredRollout]) -> DeviceBatch:
        """The batch of an update. With degenerate_group_masking, groups without an advantage are
        not learned: they add neither to the KL nor to the number of rows; nor are, with
        mask_truncated, completions that the limit of their length ended."""
        config, length = self.config, self.config.max_target_length
        rollouts = [
            Rollout(
                each.prompt_ids,
                each.token_ids,
                log_probs=each.log_probs,
                finish_reason=each.finish_reason,
                learned=each.learned,
            )
            for each in scored
        ]
        fields = rollout_fields(rollouts, length)
        is_sampled = fields["targets_segmentation"] != 0
        fields[SAMPLER_LOGPS] = token_field([each.log_probs for each in scored], is_sampled)
        if self.score is not None:
            fields[OLD_LOGPS] = token_field([each.old_logps for each in scored], is_sampled)
        values = np.array([each.advantage for each in scored], np.float32)
        is_learned = np.ones(len(scored), np.float32)
        if config.degenerate_group_masking:
            is_degenerate = np.asarray(degenerate_groups(values, config.num_generations))
            is_learned[np.repeat(is_degenerate, config.num_generations)] = 0
        if config.mask_truncated:
            is_learned[[each.finish_reason in TRUNCATED for each in scored]] = 0
        rows = np.arange(len(scored), dtype=np.float32)
        fields |= {ADVANTAGES: values, IS_LEARNED: is_learned, ROW_INDEX: rows}
        return self.data_loader.to_device(fields)


def compile_score(context: RunContext) -> Callable[[Any, Any], jax.Array]:
    """`GroupRelativePolicy.score` of a batch of rollouts."""
    objective, shardings = context.objective, context.shardings
    assert isinstance(objective, GroupRelativePolicy)
    rows = context.config.global_batch_size_to_train_on
    batch = context.abstract_batch(rows)
    fields = {name: batch[name] for name in FIELDS}
    weights = with_shardings(context.abstract_weights, shardings.weights)
    jitted = jax.jit(objective.score, out_shardings=shardings.replicated)
    return lower(context, jitted, weights, fields).compile()


def read_prompts(batch: Batch) -> list[Prompt]:
    lengths = (batch["inputs_segmentation"] != 0).sum(axis=1)
    return [
        Prompt(ids[:length].tolist(), record)
        for ids, length, record in zip(batch["inputs"], lengths, batch[RECORD], strict=True)
    ]


def rollout_fields(rollouts: Sequence[Rollout], length: int) -> Batch:
    """The fields of FIELDS of a batch whose rows are these rollouts."""
    rows = [rollout.row(length) for rollout in rollouts]
    return {name: np.stack([row[name] for row in rows]) for name in FIELDS}


def token_field(values: Sequence[Sequence[float]], is_sampled: np.ndarray) -> np.ndarray:
    """float32 [rows, length, 1]: the values of the sampled tokens of each row, 0 elsewhere."""
    field = np.zeros((*is_sampled.shape, 1), np.float32)
    for row, mask in enumerate(is_sampled):
        field[row, mask, 0] = values[row]
    return field


def check_agreement(
    config: MaxTextConfig,
    rollouts: Sequence[ScoredRollout],
    differences: np.ndarray,
    positions: np.ndarray,
) -> None:
    """Raise UserError, which names the worst token, if the trainer and the sampler disagree beyond
    sampler_trainer_tolerance. `differences` [rows] are the largest of each row, log-probability of
    the trainer less that of the sampler, and `positions` where they are in the targets."""
    row = int(np.argmax(np.abs(differences)))  # the first nan, if there is one
    tolerance = config.sampler_trainer_tolerance
    if tolerance is None:
        tolerance = TOLERANCE.get(config.dtype.value, TOLERANCE_16_BIT)
    if abs(differences[row]) <= tolerance:
        return
    rollout = rollouts[row]
    at = int(positions[row]) - len(rollout.prompt_ids) + 1
    learned = rollout.learned
    sampler_logp = rollout.log_probs[at if learned is None else sum(learned[:at])]
    raise UserError(
        f"the sampler and the trainer disagree: token {rollout.token_ids[at]}, number {at} of "
        f"completion {row}, has the log-probability {sampler_logp:.6g} in the sampler and "
        f"{sampler_logp + differences[row]:.6g} in the trainer, more than {tolerance:g} apart "
        "(sampler_trainer_tolerance)"
    )


def reward_metrics(scored: Sequence[ScoredRollout], num_generations: int) -> dict[str, float]:
    """Means over the completions that are scored; `reward_std` is that of the groups."""
    rewards = np.array([each.reward for each in scored]).reshape(-1, num_generations)
    values = np.array([each.advantage for each in scored])
    metrics = {"reward": mean(rewards)}
    deviations = [np.std(group[~np.isnan(group)], ddof=1) for group in rewards if count(group) > 1]
    metrics["reward_std"] = float(np.mean(deviations)) if deviations else 0.0
    for name in scored[0].rewards:
        metrics[f"rewards/{name}"] = mean(np.array([each.rewards[name] for each in scored]))
    is_degenerate = np.asarray(degenerate_groups(values, num_generations))
    return metrics | {"groups/degenerate": float(is_degenerate.mean())}


def count(values: np.ndarray) -> int:
    return int((~np.isnan(values)).sum())


def mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if count(values) else float("nan")


def log_rollout(rollout: ScoredRollout) -> None:
    """rl=true: one rollout of each step in full."""
    LOGGER.info(
        "step %d\nprompt: %s\ncompletion: %s\nrewards: %s\nadvantage: %.4g",
        rollout.step,
        rollout.prompt,
        rollout.completion,
        ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items()),
        rollout.advantage,
    )
