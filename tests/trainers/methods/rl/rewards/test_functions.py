"""Reward functions of the user."""

import asyncio
import sys
import warnings

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.trainers.methods.rl.rewards.functions import (
    compute_rewards,
    load_reward_functions,
    reward_functions,
    total_rewards,
)

PROMPTS = ["p", "p", "q", "q"]
COMPLETIONS = ["a", "bb", "ccc", "dddd"]


def length(prompts, completions, **columns):
    return [len(text) for text in completions]


async def slow_length(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [10 * len(text) for text in completions]


def even_only(prompts, completions, answer, **columns):
    pairs = zip(completions, answer, strict=True)
    return [None if len(text) % 2 else right for text, right in pairs]


def compute(*functions, **columns):
    return compute_rewards(reward_functions(functions), PROMPTS, COMPLETIONS, columns)


def test_functions_get_completions_and_columns():
    rewards = compute(length, slow_length, even_only, answer=[5, 6, 7, 8])
    np.testing.assert_array_equal(rewards["length"], [1, 2, 3, 4])
    np.testing.assert_array_equal(rewards["slow_length"], [10, 20, 30, 40])
    np.testing.assert_array_equal(rewards["even_only"], [np.nan, 6, np.nan, 8])


def test_async_functions_run_inside_a_running_event_loop():
    async def notebook():
        return compute(slow_length)

    np.testing.assert_array_equal(asyncio.run(notebook())["slow_length"], [10, 20, 30, 40])


def test_total_is_the_weighted_sum_of_what_is_scored():
    functions = reward_functions([length, even_only], weights=[0.5, 2.0])
    rewards = compute_rewards(functions, PROMPTS, COMPLETIONS, {"answer": [5, 6, 7, 8]})
    np.testing.assert_array_equal(total_rewards(functions, rewards), [0.5, 13.0, 1.5, 18.0])
    unscored = {"length": np.full(4, np.nan), "even_only": np.array([np.nan, 1, 1, 1])}
    np.testing.assert_array_equal(total_rewards(functions, unscored), [np.nan, 2, 2, 2])


def fails(prompts, completions, **columns):
    return [1 / (3 - len(text)) for text in completions]


async def fails_late(prompts, completions, **columns):
    await asyncio.sleep(0)
    return fails(prompts, completions)


def exits(prompts, completions, **columns):
    sys.exit("no licence")


async def exits_late(prompts, completions, **columns):
    await asyncio.sleep(0)
    sys.exit("no licence")


def fails_as_a_batch(prompts, completions, **columns):
    return [1 / (4 - len(completions)) for _ in completions]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, "fails failed for row 2, completion 'ccc': ZeroDivisionError"),
        (fails_late, "fails_late failed for row 2, completion 'ccc': ZeroDivisionError"),
        (exits, "exits failed for row 0, completion 'a': SystemExit: no licence"),
        (exits_late, "exits_late failed for row 0, completion 'a': SystemExit: no licence"),
        (fails_as_a_batch, "failed for this batch: ZeroDivisionError"),
        (lambda prompts, completions: [1, 2], "returned 2 rewards for 4 completions"),
        (lambda prompts, completions: 1.0, "returned float instead of a list"),
        (lambda prompts, completions: "1234", "returned str instead of a list"),
        (lambda prompts, completions: [1, "x", 2, 3], "returned 'x' for row 1, which is no number"),
        (lambda prompts, completions: [1, 2, np.inf, 3], "returned inf for row 2"),
    ],
)
def test_errors_name_the_row(function, message):
    with pytest.raises(UserError, match=message):
        compute(function)


def test_columns_have_other_names_than_the_arguments():
    with pytest.raises(UserError, match="a column completions, .*: rename the column"):
        compute(length, completions=["x"] * 4)


def test_async_functions_before_a_failing_one_have_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that was never awaited
        with pytest.raises(UserError, match="fails failed for row 2"):
            compute(slow_length, fails)


def test_weights_and_names_fit_the_functions():
    with pytest.raises(ConfigError, match="2 numbers for 1 reward functions: length"):
        reward_functions([length], weights=[1.0, 2.0])
    with pytest.raises(ConfigError, match="two reward functions have the name 'length'"):
        reward_functions([length, length])
    with pytest.raises(ConfigError, match="rewards must be a list of functions, not <function"):
        reward_functions(length)
    with pytest.raises(ConfigError, match="rewards must be a list of functions, and has 'length'"):
        reward_functions(["length"])


def test_functions_load_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def two(prompts, completions, **columns):\n    return [2.0] * len(prompts)\n")
    (function,) = load_reward_functions(str(path), ["two"], [3.0])
    assert (function.name, function.weight) == ("two", 3.0)
    assert function(PROMPTS, COMPLETIONS, {}) == [2.0] * 4
    with pytest.raises(ConfigError, match="reward_functions_path=.*three"):
        load_reward_functions(str(path), ["three"])
