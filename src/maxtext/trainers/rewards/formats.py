"""Points for the format of a completion.

Notation: R, r the start and the end token of the reasoning, S, s those of the solution.
"""

import re

from maxtext.trainers.rewards.keys import RewardKeys


def delimiters(keys: RewardKeys) -> tuple[str, str, str, str]:
    """(R, r, S, s)"""
    return (
        keys.reasoning_start_token,
        keys.reasoning_end_token,
        keys.solution_start_token,
        keys.solution_end_token,
    )


def has_format(completion: str, keys: RewardKeys) -> bool:
    """Whether `R.*?r.*?S(.+?)s` occurs anywhere; the dot matches newlines."""
    start, end, solution_start, solution_end = map(re.escape, delimiters(keys))
    pattern = f"{start}.*?{end}.*?{solution_start}.+?{solution_end}"
    return re.search(pattern, completion, re.DOTALL) is not None


def format_exact(completion: str, keys: RewardKeys) -> float:
    """reward_exact_format_match for a completion that has the format, else 0."""
    return keys.reward_exact_format_match if has_format(completion, keys) else 0.0


def format_parts(completion: str, keys: RewardKeys) -> float:
    """For each of the four tokens reward_partial_format_match if it occurs exactly once, else
    penalty_incorrect_format."""
    return sum(
        keys.reward_partial_format_match
        if completion.count(token) == 1
        else keys.penalty_incorrect_format
        for token in delimiters(keys)
    )
