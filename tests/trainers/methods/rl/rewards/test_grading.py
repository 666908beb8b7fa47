"""Grades of several responses to one problem."""

import math
from itertools import combinations

import pytest

from maxtext import rewards

RESPONSES = [
    f"<reasoning>so</reasoning><answer>{text}</answer>" for text in ("1", "42", "42", "41")
]


@pytest.mark.parametrize(
    ("eval_mode", "expected"),
    [("pass", (1.0, 1.0, 1.0)), ("maj", (1.0, 1.0, 1.0)), ("pass_at_1", (0.5, 0.75, 1.0))],
)
def test_grades_of_four_responses(eval_mode, expected):
    assert rewards.grade(RESPONSES, ["42"], eval_mode=eval_mode) == expected


def test_majority_is_the_first_of_equally_frequent_answers():
    responses = ["<answer>41</answer>", "<answer>42</answer>", "no answer"]
    assert rewards.grade(responses, ["42"], eval_mode="maj") == (0.0, 1.0, 0.0)
    assert rewards.grade(["no answer"], ["42"], eval_mode="maj") == (0.0, 0.0, 0.0)


def test_eval_mode_is_one_of_three():
    with pytest.raises(ValueError, match="pass, maj, pass_at_1"):
        rewards.grade(RESPONSES, ["42"], eval_mode="best")


@pytest.mark.parametrize(("n", "right", "k"), [(10, 5, 3), (4, 0, 2), (4, 4, 1), (8, 7, 2)])
def test_pass_at_k_counts_the_subsets_with_a_right_response(n, right, k):
    subsets = list(combinations(range(n), k))
    expected = sum(min(subset) < right for subset in subsets) / len(subsets)
    assert math.isclose(rewards.pass_at_k(n, right, k), expected)


def test_pass_at_k_of_more_responses_than_there_are():
    with pytest.raises(ValueError, match="not defined"):
        rewards.pass_at_k(2, 1, 3)
