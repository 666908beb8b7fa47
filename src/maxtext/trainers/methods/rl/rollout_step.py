"""The step of reinforcement learning: sample groups, score them, and update num_iterations times.

Each of batch_size prompts gets num_generations completions from the engine, on the weights of the
step. The first update computes the log-probabilities of the same tokens: where one differs from
that of the engine by more than a tolerance, the run ends. The seed, the step, the prompt and the
number of a completion decide its tokens, so that a resumed run goes on bit for bit.

With off_policy_steps=k, the prompts of the next steps are sampled while a step trains, with its
weights, which are up to k updates old when the rollouts are trained on. The update runs on the
trainer's devices while the host drives the sampler, so that both are busy if they have their own.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.common.types import Tree
from maxtext.configs.derive import run_folder, visible_devices
from maxtext.configs.mesh_sizes import size_key
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import FIELDS, Batch
from maxtext.sharding import AxisRules, make_mesh
from maxtext.tokenizers import load_tokenizer
from maxtext.trainers.compilation.compile import default_options, lower
from maxtext.trainers.data_loader import DeviceBatch
from maxtext.trainers.hooks import TrainingFailed
from maxtext.trainers.methods.method import StepSetup
from maxtext.trainers.methods.rl.agents.agent import AgenticSampler
from maxtext.trainers.methods.rl.device_split import DeviceSplit, sampler_parallelism, split_devices
from maxtext.trainers.methods.rl.group_sampler import (
    GroupSampler,
    Prompt,
    RewardWatch,
    SampledBatch,
    compiled_degenerate_groups,
    read_prompts,
    reward_metrics,
)
from maxtext.trainers.methods.rl.grpo import (
    ADVANTAGES,
    IS_TRAINED_ON,
    OLD_LOGPS,
    ROW_DIFFERENCES,
    ROW_INDEX,
    ROW_POSITIONS,
    SAMPLER_LOGPS,
    GRPOObjective,
    needs_old_logps,
)
from maxtext.trainers.methods.rl.prompt_loader import (
    PromptLoader,
    common_lengths,
    group_microbatches,
    shared_prefix,
)
from maxtext.trainers.methods.rl.rewards.answers import RewardKeys, read_answer
from maxtext.trainers.methods.rl.rewards.functions import build_rewards
from maxtext.trainers.methods.rl.rollout import (
    Rollout,
    Sampler,
    rollout_metrics,
    stop_token_ids,
)
from maxtext.trainers.methods.rl.rollout_log import Clock, RolloutLog, SpanLog
from maxtext.trainers.methods.rl.weight_sync import WeightSync
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.shardings import with_shardings
from maxtext.trainers.step import TrainState

# The largest difference of a log-probability between the engine and the trainer, by dtype
TOLERANCE = {"float32": 2e-3}
TOLERANCE_16_BIT = 0.5
# The finish reasons of completions that a limit ended
TRUNCATED = ("length", "turns")


class GroupRolloutStep:
    """A train step that samples its batch first."""

    def __init__(self, setup: StepSetup):
        self.context = context = setup.context
        objective, data_loader = context.objective, setup.data_loader
        assert isinstance(objective, GRPOObjective)
        assert isinstance(data_loader, PromptLoader)
        self.config = context.config
        self.objective = objective
        self.train_step = setup.train_step
        self.data_loader = data_loader
        self.step = setup.first_step
        self.folder = run_folder(self.config)
        self.log = RolloutLog(self.folder, self.step)
        tokenizer, agent = load_tokenizer(self.config), setup.user_code.agent
        self.sampler = make_sampler(context)
        agentic = None
        if self.config.use_agentic_rollout:
            agentic = AgenticSampler(self.config, tokenizer, agent)
        self.group_sampler = GroupSampler(
            self.config,
            self.sampler,
            tokenizer=tokenizer,
            rewards=build_rewards(
                self.config, setup.user_code.rewards, agent.rewards if agent else ()
            ),
            stop_token_ids=stop_token_ids(self.config, setup.checkpoint),
            agentic=agentic,
        )
        self.queue: deque[SampledBatch] = deque()  # of later steps, off policy
        self.error: UserError | None = None  # of sampling them
        self.score = compile_score(context) if needs_old_logps(self.config) else None
        self.spans = None
        if self.config.enable_tunix_perf_metrics:
            self.spans = SpanLog(self.folder, self.step)
        self.rollouts: list[Rollout] = []
        self.reward_watch = RewardWatch()
        self.batch: DeviceBatch | None = None
        self.metrics: dict[str, float] = {}
        data_loader.step = self.step

    def __call__(
        self, state: TrainState, prompts: Batch, key: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array | float]]:
        clock = Clock()
        first = self.step - self.step % self.config.num_iterations
        is_first_update = self.batch is None or first == self.step
        is_on_policy = False
        sampled: SampledBatch | None = None
        if is_first_update:
            if first < self.step:
                self.rollouts = self.recorded_rollouts(first)
                self.metrics = rollout_metrics(self.rollouts)
                self.metrics |= reward_metrics(self.rollouts, self.config.num_generations)
            else:
                sampled = self.take(state, read_prompts(prompts), clock)
                is_on_policy = sampled.version == self.step
                self.rollouts = self.with_old_logps(state, sampled.rollouts)
                clock.stop("score")
            self.batch = self.prepare(self.rollouts)
        assert self.batch is not None
        later = self.later_prompts() if is_first_update else []
        if later:
            weights = self.context.model_weights(state)
            self.sampler.sync(weights, self.group_sampler.num_requests, must_copy=True)
        clock.stop("prepare")
        version = self.step
        state, metrics = self.train_step(state, self.batch, key)
        if sampled is not None:
            self.record(sampled)  # while the device computes the update
        self.sample_later(later, version, clock)
        differences = np.asarray(metrics.pop(ROW_DIFFERENCES))
        positions = np.asarray(metrics.pop(ROW_POSITIONS)).astype(int)
        if is_on_policy:
            check_agreement(self.config, self.rollouts, differences, positions)
        clock.stop("update")
        metrics["sampling/logp_difference_max"] = np.abs(differences).max()
        if prefix := self.batch.shared_prefix:
            num_copies = len(self.rollouts) - len(self.rollouts) // self.config.num_generations
            metrics["computed_tokens"] = metrics["total_weights"] - prefix * num_copies
        if self.spans is not None:
            self.spans.append(self.step, clock)
        self.step += 1
        return state, metrics | self.metrics | clock.metrics()

    def recorded_rollouts(self, step: int) -> list[Rollout]:
        """The rollouts of a step whose updates an earlier process began. Raises UserError if the
        run's folder does not have them."""
        rollouts = self.log.read(step)
        count = self.config.global_batch_size_to_train_on
        if len(rollouts) != count:
            raise UserError(
                f"{self.log.path} has {len(rollouts)} of the {count} rollouts of step {step}, and "
                "the run has begun their updates: restore the file, or delete the checkpoint of "
                f"step {self.step}"
            )
        return rollouts

    def sample_later(
        self, prompts: Sequence[tuple[int, Batch]], version: int, clock: Clock
    ) -> None:
        """Fill the queue. An error is raised by the next step, which has the updated weights."""
        try:
            for step, batch in prompts:
                sampled = self.group_sampler.sample(read_prompts(batch), step, version, clock)
                self.queue.append(sampled)
        except UserError as error:
            self.error = error
        finally:
            self.sampler.release()

    def take(self, state: TrainState, prompts: list[Prompt], clock: Clock) -> SampledBatch:
        """The batch of this step: of the queue, or sampled now. One that is older than
        off_policy_steps updates is thrown away. Raises TrainingFailed if sampling fails: the
        weights of the last update are there, and will be saved."""
        if self.error is not None:
            raise training_failure(self.error) from self.error
        while self.queue:
            sampled = self.queue.popleft()
            if self.step - sampled.version <= self.config.off_policy_steps:
                assert sampled.step == self.step, "the queue has the batches in their order"
                return sampled
            LOGGER.info("a batch of step %d is too old: it is sampled again", sampled.step)
        weights = self.context.model_weights(state)
        with self.sampler.synced(weights, self.group_sampler.num_requests):
            clock.stop("sync")
            try:
                return self.group_sampler.sample(prompts, self.step, self.step, clock)
            except UserError as error:
                raise training_failure(error) from error

    def later_prompts(self) -> list[tuple[int, Batch]]:
        """The prompts to sample while this step trains, with the steps that they are for: those
        that are off_policy_steps updates ahead at most, and not in the queue."""
        interval = self.config.num_iterations
        count = self.config.off_policy_steps // interval
        batches = self.data_loader.peek(count)
        first = self.step - self.step % interval  # a run may resume between updates of a batch
        steps = range(first + interval, self.config.steps, interval)
        return list(zip(steps, batches, strict=False))[len(self.queue) :]

    def record(self, sampled: SampledBatch) -> None:
        """Log the batch that this step trains on."""
        self.log.append(self.rollouts)
        self.reward_watch.add(sampled.metrics)
        if self.config.rl:
            log_rollout(self.rollouts[0], RewardKeys.from_config(self.config))
        self.metrics = sampled.metrics
        if self.config.off_policy_steps:
            self.metrics = {**sampled.metrics, "policy/age_max": self.step - sampled.version}

    def with_old_logps(self, state: TrainState, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts with log-probabilities under the trainer's model, if the loss needs
        them."""
        if self.score is None:
            return rollouts
        batch = rollout_fields(rollouts, self.config.max_target_length)
        values = np.asarray(self.score(state.weights, self.data_loader.to_device(batch).fields))
        is_sampled = batch["targets_segmentation"] != 0
        return [
            replace(rollout, old_logps=tuple(map(float, row[mask])))
            for rollout, row, mask in zip(rollouts, values, is_sampled, strict=True)
        ]

    def prepare(self, scored: list[Rollout]) -> DeviceBatch:
        """The batch of an update. With degenerate_group_masking, groups without an advantage are
        not trained on: they add neither to the KL nor to the number of rows; nor are, with
        mask_truncated, completions that the limit of their length ended."""
        config, length = self.config, self.config.max_target_length
        fields = rollout_fields(scored, length)
        is_sampled = fields["targets_segmentation"] != 0
        fields[SAMPLER_LOGPS] = token_field([each.log_probs for each in scored], is_sampled)
        if self.score is not None:
            fields[OLD_LOGPS] = token_field([each.old_logps for each in scored], is_sampled)
        values = np.array([each.advantage for each in scored], np.float32)
        is_trained_on = np.ones(len(scored), np.float32)
        if config.degenerate_group_masking:
            is_degenerate = np.asarray(compiled_degenerate_groups(values, config.num_generations))
            is_trained_on[np.repeat(is_degenerate, config.num_generations)] = 0
        if config.mask_truncated:
            is_trained_on[[each.finish_reason in TRUNCATED for each in scored]] = 0
        rows = np.arange(len(scored), dtype=np.float32)
        fields |= {ADVANTAGES: values, IS_TRAINED_ON: is_trained_on, ROW_INDEX: rows}
        fields = group_microbatches(fields, config.gradient_accumulation_steps)
        prompts = [each.prompt_ids for each in scored]
        prefix = shared_prefix(self.context, common_lengths(prompts, config.num_generations))
        return self.data_loader.to_device(fields)._replace(shared_prefix=prefix)


def training_failure(error: UserError) -> TrainingFailed:
    failure = TrainingFailed(str(error))
    failure.details, failure.exit_code = error.details, error.exit_code
    return failure


def compile_score(context: RunContext) -> Callable[[Tree, dict[str, jax.Array]], jax.Array]:
    """`GRPOObjective.score` of a batch of rollouts."""
    objective, shardings = context.objective, context.shardings
    assert isinstance(objective, GRPOObjective)
    rows = context.config.global_batch_size_to_train_on
    batch = context.abstract_batch(rows)
    fields = {name: batch[name] for name in FIELDS}
    weights = with_shardings(context.abstract_weights, shardings.weights)
    jitted = jax.jit(objective.score, out_shardings=shardings.replicated)
    return lower(context, jitted, weights, fields).compile(default_options(context))


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
    rollouts: Sequence[Rollout],
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
    trained_on = rollout.trained_on
    sampler_logp = rollout.log_probs[at if trained_on is None else sum(trained_on[:at])]
    raise UserError(
        f"the sampler and the trainer disagree: token {rollout.token_ids[at]}, number {at} of "
        f"completion {row}, has the log-probability {sampler_logp:.6g} in the sampler and "
        f"{sampler_logp + differences[row]:.6g} in the trainer, more than {tolerance:g} apart "
        "(sampler_trainer_tolerance)"
    )


def log_rollout(rollout: Rollout, keys: RewardKeys) -> None:
    """rl=true: one rollout of each step in full, with the answer that rewards read in it."""
    LOGGER.info(
        "step %d\nprompt: %s\ncompletion: %s\nanswer: %s\nrewards: %s\nadvantage: %.4g",
        rollout.step,
        rollout.prompt,
        rollout.completion,
        read_answer(rollout.completion, keys),
        ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items()),
        rollout.advantage,
    )


ROLLOUT_KEYS = tuple(f"rollout_{axis}_parallelism" for axis in ("data", "tensor", "expert"))


def make_sampler(context: RunContext) -> Sampler:
    """On the arrays of the trainer if both have the same devices and no rollout_*_parallelism is
    set; otherwise on copies. Raises ConfigError if the keys do not fit the devices."""
    config, template = context.config, context.objective.model_template
    visible = visible_devices()
    split = split_devices(config, visible.count, visible.slices)
    sets_layout = any(config.source(key).is_user for key in ROLLOUT_KEYS)
    if split.is_shared and not sets_layout:
        if visible.count > 1:
            LOGGER.info("%d devices train and sample in turn", visible.count)
        return Sampler(config, template, context.rules)
    rollout_config = sampler_config(config, split)
    devices = [jax.devices()[index] for index in split.sampler]
    rules = AxisRules.from_config(rollout_config, make_mesh(rollout_config, devices))
    LOGGER.info(
        "devices %d to %d train, %d to %d sample",
        split.trainer.start,
        split.trainer.stop - 1,
        split.sampler.start,
        split.sampler.stop - 1,
    )
    axes, weights = context.weight_axes, context.abstract_weights
    sync = WeightSync(
        rules.shardings(axes, weights), context.trained, chunk_size=config.reshard_chunk_size
    )
    return Sampler(rollout_config, template, rules, sync)


def sampler_config(config: MaxTextConfig, split: DeviceSplit) -> MaxTextConfig:
    """The configuration of the run with the mesh of the sampler: its slices are copies of the
    model."""
    sizes = sampler_parallelism(config, len(split.sampler))
    slices = math.gcd(split.sampler_slices, sizes["data"])
    ici = [sizes.get(axis, 1) // (slices if axis == "data" else 1) for axis in config.mesh_axes]
    dcn = [slices if axis == "data" else 1 for axis in config.mesh_axes]
    changed: dict[str, int | list[int]] = {"ici_parallelism": ici, "dcn_parallelism": dcn}
    for axis, inside, between in zip(config.mesh_axes, ici, dcn, strict=True):
        changed |= {size_key(axis, "ici"): inside, size_key(axis, "dcn"): between}
    return config.model_copy(update=changed)
