"""Reward-model training as a method: preference pairs, and the Bradley-Terry loss of their
scores."""

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.row_formats import SCORED_PAIRS
from maxtext.layers.parameters import Template
from maxtext.sharding import AxisRules
from maxtext.trainers.methods.method import Method
from maxtext.trainers.methods.reward.objective import RewardObjective


def reward_objective(
    config: MaxTextConfig, template: Template, rules: AxisRules
) -> RewardObjective:
    return RewardObjective(config, template)


REWARD = Method(
    "reward-model training",
    is_chosen=lambda config: config.num_labels > 0,
    row_format=lambda config: SCORED_PAIRS,
    objective=reward_objective,
)
