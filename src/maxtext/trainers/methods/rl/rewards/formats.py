"""Points for the format of a completion.

Notation: R, r the start and the end token of the reasoning, S, s those of the solution.
"""

import re

from maxtext.trainers.methods.rl.rewards.keys import RewardKeys


def delimiters(config: RewardKeys) -> tuple[str, str, str, str]:
    """(R, r, S, s)"""
    return (
        config.reasoning_start_token,
        config.reasoning_end_token,
        config.solution_start_token,
        config.solution_end_token,
    )


def with_start(completion: str, config: RewardKeys) -> str:
    """The completion after the R that the prompt ends with, if it does."""
    if config.reasoning_start_token_in_prompt:
        return config.reasoning_start_token + completion
    return completion


def has_format(completion: str, config: RewardKeys) -> bool:
    """Whether `R.*?r.*?S(.+?)s` occurs anywhere; the dot matches newlines."""
    start, end, solution_start, solution_end = map(re.escape, delimiters(config))
    pattern = f"{start}.*?{end}.*?{solution_start}.+?{solution_end}"
    return re.search(pattern, with_start(completion, config), re.DOTALL) is not None


def format_exact(completion: str, config: RewardKeys) -> float:
    """reward_exact_format_match for a completion that has the format, else 0."""
    return config.reward_exact_format_match if has_format(completion, config) else 0.0


def format_parts(completion: str, config: RewardKeys) -> float:
    """For each of the four tokens reward_partial_format_match if it occurs exactly once, else
    penalty_incorrect_format."""
    text = with_start(completion, config)
    return sum(
        config.reward_partial_format_match
        if text.count(token) == 1
        else config.penalty_incorrect_format
        for token in delimiters(config)
    )
