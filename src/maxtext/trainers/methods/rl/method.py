"""Reinforcement learning as a method: prompts, rollouts, and the loss of GRPO and GSPO."""

from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.metrics import Recorder
from maxtext.input_pipeline.row_formats import PROMPTS
from maxtext.layers.parameters import Template
from maxtext.sharding import AxisRules
from maxtext.trainers.adapters import base_template
from maxtext.trainers.data_loader import TrainDataLoader
from maxtext.trainers.loop import Hook, TrainStep
from maxtext.trainers.methods.method import Method, StepSetup
from maxtext.trainers.methods.rl.grpo import GRPOObjective
from maxtext.trainers.run_context import RunContext


class PromptBatches:
    """batch_size prompts a step, whose num_generations completions are the rows."""

    rows_key = "batch_size or num_generations"
    microbatch_key = "train_micro_batch_size"

    def rows_to_read(self, config: MaxTextConfig, step: int) -> int:
        return config.batch_size

    def sizes_to_read(self, config: MaxTextConfig) -> list[int]:
        return [config.batch_size]

    def microbatch_value(self, config: MaxTextConfig, rows: int, num_devices: int) -> float:
        return rows / config.num_generations

    def possible_rows(self, config: MaxTextConfig, limit: int, shards: int) -> int:
        """The prompts of a step divide into equal microbatches."""
        prompts, samples = config.batch_size, config.num_generations
        sizes = [size * samples for size in range(1, prompts + 1) if prompts % size == 0]
        return max((rows for rows in sizes if rows <= limit), default=0)

    def with_microbatch(
        self, config: MaxTextConfig, rows: int, num_devices: int
    ) -> dict[str, float]:
        return {
            self.microbatch_key: self.microbatch_value(config, rows, num_devices),
            "gradient_accumulation_steps": config.batch_size * config.num_generations // rows,
        }


def grpo_objective(config: MaxTextConfig, template: Template, rules: AxisRules) -> GRPOObjective:
    return GRPOObjective(config, template, base_template=base_template(config, rules))


# The functions below import the inference engine, which other methods do not need.


def read_prompts(context: RunContext) -> TrainDataLoader:
    from maxtext.trainers.methods.rl.prompt_loader import PromptLoader

    return PromptLoader(context)


def sample_groups(setup: StepSetup) -> TrainStep:
    from maxtext.trainers.methods.rl.rollout_step import GroupRolloutStep

    return GroupRolloutStep(setup)


def evaluate_responses(train_step: TrainStep, recorder: Recorder) -> list[Hook]:
    from maxtext.trainers.methods.rl.response_evaluation import response_evaluation_hooks
    from maxtext.trainers.methods.rl.rollout_step import GroupRolloutStep

    assert isinstance(train_step, GroupRolloutStep)
    return response_evaluation_hooks(train_step, recorder)


def engine_bytes(context: RunContext) -> int:
    from maxtext.trainers.methods.rl.rollout import engine_bytes

    total = engine_bytes(context.config, context.objective.model_template, context.rules)
    return total // context.rules.mesh.size


GRPO = Method(
    "reinforcement learning",
    is_chosen=lambda config: bool(config.use_grpo),
    row_format=lambda config: PROMPTS,
    objective=grpo_objective,
    batches=PromptBatches(),
    has_eval_loss=False,  # responses are sampled instead
    data_loader=read_prompts,
    wrap_step=sample_groups,
    hooks=evaluate_responses,
    rollout_bytes=engine_bytes,
)
