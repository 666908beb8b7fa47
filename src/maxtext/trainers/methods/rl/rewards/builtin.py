"""The built-in rewards as reward functions of a run."""

from collections.abc import Sequence
from typing import Any

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.trainers.methods.rl.rewards.formats import format_exact, format_parts
from maxtext.trainers.methods.rl.rewards.functions import (
    Columns,
    RewardFunction,
    load_reward_functions,
    with_weights,
)
from maxtext.trainers.methods.rl.rewards.keys import RewardKeys
from maxtext.trainers.methods.rl.rewards.score import answer_rewards

ANSWER_COLUMNS = ("answer", "answers", "solution", "target")


def build_rewards(
    config: MaxTextConfig,
    functions: Sequence[RewardFunction] = (),
    environment: Sequence[RewardFunction] = (),
) -> list[RewardFunction]:
    """The reward functions of a run: those of its environment, and given ones, those of
    reward_functions_path, or without any of these the built-in ones; with reward_weights. Raises
    ConfigError."""
    path = config.reward_functions_path
    if functions and path:
        raise ConfigError(
            f"reward_functions_path={path} would do nothing: rewards are given as functions"
        )
    if path:
        functions = load_reward_functions(path, config.reward_functions)
    functions = [*environment, *functions]
    return with_weights(functions or builtin_rewards(config), config.reward_weights)


def builtin_rewards(config: MaxTextConfig) -> list[RewardFunction]:
    """`format_exact`, `format_parts` and `answer`, with the keys of a run."""
    reward_config = RewardKeys.from_config(config)

    def exact(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        return [format_exact(text, reward_config) for text in completions]

    def parts(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        return [format_parts(text, reward_config) for text in completions]

    def answer(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        return answer_rewards(completions, answer_column(columns), reward_config)

    return [
        RewardFunction("format_exact", exact),
        RewardFunction("format_parts", parts),
        RewardFunction("answer", answer),
    ]


def answer_column(columns: Columns) -> Sequence[Any]:
    """The column with the reference answers. Raises UserError if there is none."""
    column = next((name for name in ANSWER_COLUMNS if name in columns), None)
    if column is None:
        raise UserError(
            f"the rows have no right answer in a column {', '.join(ANSWER_COLUMNS)}, which "
            "completions are compared with"
        )
    return columns[column]
