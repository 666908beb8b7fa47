"""The accuracy of the responses to a problem."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from maxtext.trainers.methods.rl.rewards.answers import accepted_answers, read_answer
from maxtext.trainers.methods.rl.rewards.formats import has_format
from maxtext.trainers.methods.rl.rewards.keys import RewardKeys
from maxtext.trainers.methods.rl.rewards.score import NEAR, compare_values, number_ratio

EVAL_MODES = ("pass", "maj", "pass_at_1")
Grade = tuple[float, float, float]  # accuracy, partial accuracy, format


def grade(responses: Sequence[str], answers: Any, *, eval_mode: str = "pass", **keys: Any) -> Grade:
    """(accuracy, partial accuracy, format) of the responses to one problem, each from 0 to 1.

    `answers`: those that count. A response is correct if its answer equals one of them, by value,
    and partially correct if it is within 10 % of one. eval_mode "pass": whether any response is;
    "maj": the most frequent answer, the first of several; "pass_at_1": the share of the responses.
    """
    if eval_mode not in EVAL_MODES:
        raise ValueError(f"eval_mode={eval_mode!r} is not one of {', '.join(EVAL_MODES)}")
    config = RewardKeys.from_python(**keys)
    (grades,) = grade_problems([responses], [answers], config)
    return combine_grades(responses, grades, eval_mode, config)


def combine_grades(
    responses: Sequence[str], grades: Sequence[Grade], eval_mode: str, config: RewardKeys
) -> Grade:
    """The grade of a problem from those of its responses; see `grade`."""
    if not grades:
        return 0.0, 0.0, 0.0
    if eval_mode == "maj":
        guesses = [read_answer(text, config) for text in responses]
        stripped = [guess.strip() for guess in guesses if guess is not None]
        if not stripped:
            return grades[0]
        most_frequent = Counter(stripped).most_common(1)[0][0]  # the first, of several
        return next(
            each
            for each, guess in zip(grades, guesses, strict=True)
            if guess is not None and guess.strip() == most_frequent
        )
    columns = list(zip(*grades, strict=True))
    if eval_mode == "pass":
        accuracy, partial, form = (float(any(column)) for column in columns)
    else:
        accuracy, partial, form = (sum(column) / len(column) for column in columns)
    return accuracy, partial, form


def grade_problems(
    responses: Sequence[Sequence[str]], answers: Sequence[Any], config: RewardKeys
) -> list[list[Grade]]:
    """The grade of each response to each problem, compared together. A response that is not
    compared in time is incorrect."""
    accepted = [accepted_answers(answer) for answer in answers]
    guesses = [[read_answer(text, config) for text in texts] for texts in responses]
    equality = compare_values(
        [guess for group in guesses for guess in group],
        [texts for texts, group in zip(accepted, guesses, strict=True) for _ in group],
        config,
    )

    def is_correct(guess: str, answer: str) -> bool:
        return guess.strip() == answer.strip() or bool(equality[answer, guess])

    def is_partially_correct(guess: str, answer: str) -> bool:
        ratio = number_ratio(guess, answer)
        return is_correct(guess, answer) or (ratio is not None and abs(ratio - 1) <= NEAR)

    def grade_one(guess: str | None, text: str, texts: tuple[str, ...]) -> Grade:
        return (
            float(guess is not None and any(is_correct(guess, answer) for answer in texts)),
            float(
                guess is not None and any(is_partially_correct(guess, answer) for answer in texts)
            ),
            float(has_format(text, config)),
        )

    return [
        [grade_one(guess, text, texts) for guess, text in zip(group, written, strict=True)]
        for group, written, texts in zip(guesses, responses, accepted, strict=True)
    ]


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 − C(n−right, k) / C(n, k): the unbiased probability that one of k responses is correct,
    from n responses of which `right` are (arXiv:2107.03374)."""
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {right} right responses of {n} is not defined")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
