"""The built-in rewards: two for the format of a completion, and one for its answer."""

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from maxtext.trainers.methods.rl.rewards.answers import (
    accepted_answers,
    choice_letter,
    parse_number,
    parse_value,
    read_answer,
)
from maxtext.trainers.methods.rl.rewards.formats import format_exact, format_parts
from maxtext.trainers.methods.rl.rewards.keys import RewardKeys
from maxtext.trainers.methods.rl.rewards.math_equality import Pair, shared_verifier
from maxtext.trainers.methods.rl.rewards.normalize import normalize

DECIMALS = 6  # numbers that are equal after rounding to these are equal, as in math-verify
NEAR, WITHIN = Fraction(1, 10), Fraction(1, 5)


def score(
    completions: Sequence[str], answers: Sequence[Any], **keys: Any
) -> dict[str, list[float]]:
    """The built-in rewards of each completion: `format_exact`, `format_parts` and `answer`.

    `answers`: the reference answer of each completion, or a list of those that count; see
    `accepted_answers`. `keys`: configuration keys of rewards. An answer that math-verify does not
    compare in time is nan: not scored.
    """
    config = RewardKeys.from_python(**keys)
    return {
        "format_exact": [format_exact(text, config) for text in completions],
        "format_parts": [format_parts(text, config) for text in completions],
        "answer": answer_rewards(completions, answers, config),
    }


def answer_rewards(
    completions: Sequence[str], answers: Sequence[Any], config: RewardKeys
) -> list[float]:
    """The points of the best accepted answer, by the first of these conditions that holds:

    - equal: reward_exact_answer
    - equal without white space around it: reward_white_space_format_match
    - equal by value: reward_exact_answer
    - numbers with a ratio in [0.9, 1.1], or in [0.8, 1.2]: reward_ratio_guess_to_answer_high, or
      reward_ratio_guess_to_answer_low
    - else penalty_incorrect_answer; penalty_incorrect_format for a completion without an answer
    """
    if len(completions) != len(answers):
        raise ValueError(f"{len(completions)} completions have {len(answers)} answers")
    guesses = [read_answer(text, config) for text in completions]
    accepted = [accepted_answers(answer) for answer in answers]
    equality = compare_values(guesses, accepted, config)
    return [
        config.penalty_incorrect_format
        if guess is None
        else best(
            [points(guess, answer, equality.get((answer, guess)), config) for answer in texts],
            config,
        )
        for guess, texts in zip(guesses, accepted, strict=True)
    ]


def best(values: list[float], config: RewardKeys) -> float:
    """The largest of the points for each accepted answer. It is nan if one was not compared and no
    other is equal to the guess; without accepted answers, that of a wrong one."""
    scored = [value for value in values if not math.isnan(value)]
    least_equal = min(config.reward_exact_answer, config.reward_white_space_format_match)
    if len(scored) < len(values) and max(scored, default=-math.inf) < least_equal:
        return math.nan
    return max(scored, default=config.penalty_incorrect_answer)


def points(guess: str, answer: str, is_equal: bool | None, config: RewardKeys) -> float:
    """`is_equal`: by value; None if that is not known."""
    if guess == answer:
        return config.reward_exact_answer
    if guess.strip() == answer.strip():
        return config.reward_white_space_format_match
    if is_equal is None:
        return math.nan
    if is_equal:
        return config.reward_exact_answer
    ratio = number_ratio(guess, answer)
    if ratio is not None and abs(ratio - 1) <= NEAR:
        return config.reward_ratio_guess_to_answer_high
    if ratio is not None and abs(ratio - 1) <= WITHIN:
        return config.reward_ratio_guess_to_answer_low
    return config.penalty_incorrect_answer


def number_ratio(guess: str, answer: str) -> Fraction | None:
    """guess / answer; None if one is no number, or the answer is 0."""
    numbers = parse_value(normalize(guess)), parse_value(normalize(answer))
    if numbers[0] is None or not numbers[1]:
        return None
    return numbers[0] / numbers[1]


def compare_values(
    guesses: Sequence[str | None], accepted: Sequence[tuple[str, ...]], config: RewardKeys
) -> dict[Pair, bool | None]:
    """Whether each (answer, guess) of different texts is equal by value: numbers and choices
    here, others by math-verify. Equal pairs are compared once."""
    pairs = dict.fromkeys(
        (answer, guess)
        for guess, texts in zip(guesses, accepted, strict=True)
        if guess is not None
        for answer in texts
        if answer.strip() != guess.strip()
    )
    equality: dict[Pair, bool | None] = {pair: equal_plainly(*pair) for pair in pairs}
    others = [pair for pair, is_equal in equality.items() if is_equal is None]
    verifier = shared_verifier(config.math_verify_num_procs)
    equality |= zip(others, verifier.equal(others, config.math_verify_timeout), strict=True)
    return equality


def equal_plainly(answer: str, guess: str) -> bool | None:
    """Whether two numbers are equal, or a choice with its text is that of a letter; None if one of
    the texts is no number."""
    if choice_letter(guess) == answer.strip():
        return True
    numbers = parse_number(answer), parse_number(guess)
    if numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0] == numbers[1] or abs(numbers[0] - numbers[1]) < Decimal(10) ** -DECIMALS / 2
