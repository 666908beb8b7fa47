"""The built-in rewards of a completion, for its format and its answer, and the accuracy of the
responses to a problem.

Answers are compared by value with math-verify, which may take forever in sympy. It runs in other
processes, each of which compares one pair at a time; those that are late are killed, and replaced
when they are needed again.

Notation: R, r are the start and the end token of the reasoning, S, s those of the solution.
"""

import math
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

from maxtext.common.extras import require
from maxtext.input_pipeline.subprocesses import start_program
from maxtext.trainers.methods.rl.rewards.answers import (
    RewardKeys,
    accepted_answers,
    choice_letter,
    parse_number,
    parse_value,
    read_answer,
)
from maxtext.trainers.methods.rl.rewards.equality import normalize

MAX_PROCS = 8
Pair = tuple[str, str]  # the right answer, and another
DECIMALS = 6  # numbers that are equal after rounding to these are equal, as in math-verify
NEAR, WITHIN = Fraction(1, 10), Fraction(1, 5)
EVAL_MODES = ("pass", "maj", "pass_at_1")
Grade = tuple[float, float, float]  # accuracy, partial accuracy, format


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


class Worker:
    def __init__(self) -> None:
        self.process: subprocess.Popen
        self.connection: Connection
        self.process, self.connection = start_program(
            "maxtext.trainers.methods.rl.rewards.equality", "work"
        )

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class MathVerifier:
    """Up to `num_procs` processes; None: one for each core, at most 8."""

    def __init__(self, num_procs: int | None = None):
        self.num_procs = num_procs or min(MAX_PROCS, os.cpu_count() or 1)
        self.idle: list[Worker] = []

    def equal(self, pairs: Sequence[Pair], timeout: float) -> list[bool | None]:
        """Whether the answers of each pair are equal; None for those that are not compared within
        `timeout` seconds, or whose process died. Raises MissingExtra without math-verify."""
        if pairs:
            require("math_verify", "comparing mathematical answers")
        results: list[bool | None] = [None] * len(pairs)
        deadline = time.monotonic() + timeout
        waiting = list(enumerate(pairs))[::-1]
        busy: dict[Connection, tuple[Worker, int]] = {}
        while waiting or busy:
            while waiting and len(busy) < self.num_procs:
                worker = self.idle.pop() if self.idle else Worker()
                index, (right, other) = waiting.pop()
                busy[worker.connection] = worker, index
                worker.connection.send((normalize(right), normalize(other)))
            ready = wait(list(busy), max(deadline - time.monotonic(), 0))
            for connection in ready:
                assert isinstance(connection, Connection)
                worker, index = busy.pop(connection)
                try:
                    results[index] = connection.recv()
                    self.idle.append(worker)
                except EOFError:  # the process died
                    worker.kill()
            if not ready:
                break
        for worker, _ in busy.values():
            worker.kill()
        return results

    def close(self) -> None:
        while self.idle:
            self.idle.pop().kill()


@cache
def shared_verifier(num_procs: int | None) -> MathVerifier:
    """The processes end with this one."""
    return MathVerifier(num_procs)


def score(
    completions: Sequence[str], answers: Sequence[object], **keys: Any
) -> dict[str, list[float]]:
    """The built-in rewards of each completion: {"format_exact", "format_parts", "answer"}, each a
    list with a number for each completion.

    `answers` has the reference answer of each completion, or a list of accepted answers; see
    `accepted_answers`. `keys` are configuration keys of rewards, such as reward_exact_answer. An
    answer that math-verify does not compare in time gets nan: it is not scored.

    Raises ValueError if the numbers of completions and answers differ, ConfigError for an unknown
    key or an invalid value, and MissingExtra if math-verify is needed and not installed.
    """
    config = RewardKeys.from_python(**keys)
    return {
        "format_exact": [format_exact(text, config) for text in completions],
        "format_parts": [format_parts(text, config) for text in completions],
        "answer": answer_rewards(completions, answers, config),
    }


def answer_rewards(
    completions: Sequence[str], answers: Sequence[object], config: RewardKeys
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
    """The largest reward among the accepted answers. It is nan if one answer was not compared and
    no other equals the guess; without accepted answers, it is the reward of a wrong answer."""
    scored = [value for value in values if not math.isnan(value)]
    least_equal = min(config.reward_exact_answer, config.reward_white_space_format_match)
    if len(scored) < len(values) and max(scored, default=-math.inf) < least_equal:
        return math.nan
    return max(scored, default=config.penalty_incorrect_answer)


def points(guess: str, answer: str, is_equal: bool | None, config: RewardKeys) -> float:
    """The reward for one accepted answer. `is_equal`: whether the values are equal; None:
    unknown."""
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
    """guess / answer; None if one is not a number, or the answer is 0."""
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
    """Whether two numbers are equal, or a choice with its text has the given letter; None if one of
    the texts is not a number."""
    if choice_letter(guess) == answer.strip():
        return True
    numbers = parse_number(answer), parse_number(guess)
    if numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0] == numbers[1] or abs(numbers[0] - numbers[1]) < Decimal(10) ** -DECIMALS / 2


def grade(
    responses: Sequence[str], answers: object, *, eval_mode: str = "pass", **keys: Any
) -> Grade:
    """(accuracy, partial accuracy, format) of the responses to one problem, each from 0 to 1.

    `answers` are the accepted answers. A response is correct if its answer equals one of them by
    value, and partially correct if it is within 10% of one. With eval_mode "pass", the accuracy is
    1 if any response is correct; with "maj", if the most frequent answer is correct (the first if
    several are equally frequent); with "pass_at_1", it is the share of correct responses. `keys`
    are as in `score`. Raises ValueError for another eval_mode.
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
    responses: Sequence[Sequence[str]], answers: Sequence[object], config: RewardKeys
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
    """1 − C(n−right, k) / C(n, k): an unbiased estimate of the probability that at least one of k
    responses is correct, from n responses of which `right` are correct (arXiv:2107.03374). Raises
    ValueError unless 0 <= right <= n and 1 <= k <= n."""
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {right} right responses of {n} is not defined")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
