"""The reward functions of a run: those of the user, or the built-in ones.

A function is `f(prompts, completions, **columns) -> a number for each row`. A number may be None:
the row is not scored. A function may be async; those of a step run together.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError, UserError, as_config_error
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.formatting import load_function
from maxtext.input_pipeline.user_code import run_failure
from maxtext.tokenizers.chat import Messages
from maxtext.trainers.methods.reward.model import RewardModel
from maxtext.trainers.methods.rl.rewards.answers import RewardKeys
from maxtext.trainers.methods.rl.rewards.grading import answer_rewards, format_exact, format_parts

ANSWER_COLUMNS = ("answer", "answers", "solution", "target")
Columns = Mapping[str, Sequence[object]]


@dataclass(frozen=True)
class RewardFunction:
    name: str
    function: Callable[..., object]
    weight: float = 1.0

    def __call__(
        self, prompts: Sequence[object], completions: Sequence[str], columns: Columns
    ) -> object:
        return self.function(prompts=list(prompts), completions=list(completions), **columns)


def reward_functions(
    functions: Sequence[Callable[..., object]], weights: Sequence[float] | None = None
) -> list[RewardFunction]:
    """Functions with their names and weights. Raises ConfigError if the weights do not fit, or if
    two functions have one name."""
    check_functions("rewards", functions)
    names = [getattr(function, "__name__", type(function).__name__) for function in functions]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two reward functions have the name {repeated[0]!r}: rename one")
    named = [
        RewardFunction(name, function) for name, function in zip(names, functions, strict=True)
    ]
    return with_weights(named, weights)


def check_functions(name: str, functions: object) -> None:
    """Raise ConfigError if an argument is no list of functions."""
    if not isinstance(functions, list | tuple):
        raise ConfigError(f"{name} must be a list of functions, not {functions!r}")
    for function in functions:
        if not callable(function):
            raise ConfigError(f"{name} must be a list of functions, and has {function!r}")


def with_weights(
    functions: Sequence[RewardFunction], weights: Sequence[float] | None
) -> list[RewardFunction]:
    """The functions with these weights, their own if None. Raises ConfigError if the weights do not
    fit."""
    if weights is None:
        return list(functions)
    if len(weights) != len(functions):
        names = ", ".join(function.name for function in functions)
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for {len(functions)} reward functions: "
            f"{names}"
        )
    return [
        replace(function, weight=float(weight))
        for function, weight in zip(functions, weights, strict=True)
    ]


def load_reward_functions(
    path: str, names: Sequence[str], weights: Sequence[float] | None = None
) -> list[RewardFunction]:
    """The functions of a module (package.module or file.py). Raises ConfigError."""
    separator = ":" if path.endswith(".py") else "."
    functions = [
        load_function(f"{path}{separator}{name}", key="reward_functions_path") for name in names
    ]
    return reward_functions(functions, weights)


def compute_rewards(
    functions: Sequence[RewardFunction],
    prompts: Sequence[object],
    completions: Sequence[str],
    columns: Columns,
) -> dict[str, np.ndarray]:
    """The rewards of each function, float32 [rows] without its weight; nan: not scored.

    Raises UserError, which names the function and the row, if a function fails.
    """
    if taken := {"prompts", "completions"} & columns.keys():
        raise UserError(
            f"the rows have a column {sorted(taken)[0]}, and reward functions have an argument of "
            "this name: rename the column"
        )
    outputs: dict[str, object] = {}
    for function in functions:
        try:
            outputs[function.name] = function(prompts, completions, columns)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            run_together(awaitables(outputs))  # Python warns of a coroutine that never ran
            raise failure(function, prompts, completions, columns, error) from error
    for name, value in run_together(awaitables(outputs)).items():
        if isinstance(value, BaseException):
            function = next(each for each in functions if each.name == name)
            raise failure(function, prompts, completions, columns, value) from value
        outputs[name] = value
    return {name: to_array(name, value, len(completions)) for name, value in outputs.items()}


def total_rewards(
    functions: Sequence[RewardFunction], rewards: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The weighted sum, float32 [rows]. A row that some functions do not score has the sum of the
    others; nan if none scores it."""
    weighted = np.stack([each.weight * rewards[each.name] for each in functions])
    is_scored = ~np.isnan(weighted)
    total = np.where(is_scored, weighted, 0).sum(axis=0)
    return np.where(is_scored.any(axis=0), total, np.nan).astype(np.float32)


def awaitables(outputs: Mapping[str, object]) -> dict[str, Awaitable]:
    return {name: value for name, value in outputs.items() if inspect.isawaitable(value)}


def run_together(awaitables: Mapping[str, Awaitable]) -> dict[str, object]:
    """The result of each, or its exception. They run in the event loop of another thread, since
    that of a notebook is running already."""
    if not awaitables:
        return {}
    results: list[object] = []

    async def result_of(awaitable: Awaitable) -> object:
        try:
            return await awaitable
        except SystemExit as error:  # would end the event loop
            return error

    async def gather() -> None:
        running = map(result_of, awaitables.values())
        results.extend(await asyncio.gather(*running, return_exceptions=True))

    thread = threading.Thread(target=lambda: asyncio.run(gather()), name="maxtext-rewards")
    thread.start()
    thread.join()
    return dict(zip(awaitables, results, strict=True))


def failure(
    function: RewardFunction,
    prompts: Sequence[object],
    completions: Sequence[str],
    columns: Columns,
    error: BaseException,
) -> UserError:
    """An error about the first row for which the function fails alone; about the batch if it fails
    for no single row."""
    row = failing_row(function, prompts, completions, columns)
    where = "this batch" if row is None else f"row {row}, completion {completions[row][:80]!r}"
    return run_failure(f"the reward function {function.name} failed for {where}", error)


def failing_row(
    function: RewardFunction,
    prompts: Sequence[object],
    completions: Sequence[str],
    columns: Columns,
) -> int | None:
    for row in range(len(completions)):
        at = slice(row, row + 1)
        values = {name: column[at] for name, column in columns.items()}
        try:
            result = function(prompts[at], completions[at], values)
            if inspect.isawaitable(result):
                result = run_together({"": result})[""]
        except (Exception, SystemExit):
            return row
        if isinstance(result, BaseException):
            return row
    return None


def to_array(name: str, values: Any, rows: int) -> np.ndarray:
    """float32 [rows]; None becomes nan. Raises UserError for another number of values, and for a
    value that is no finite number."""
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError
        values = list(values)
    except TypeError:
        raise UserError(
            f"the reward function {name} returned {type(values).__name__} instead of a list of "
            "numbers"
        ) from None
    if len(values) != rows:
        raise UserError(
            f"the reward function {name} returned {len(values)} rewards for {rows} completions"
        )
    array = np.full(rows, np.nan, np.float32)
    for row, value in enumerate(values):
        if value is None:
            continue
        try:
            array[row] = float(value)
        except (TypeError, ValueError):
            raise UserError(
                f"the reward function {name} returned {value!r} for row {row}, which is no number"
            ) from None
        if math.isinf(array[row]):
            raise UserError(f"the reward function {name} returned {value!r} for row {row}")
    return array


def build_rewards(
    config: MaxTextConfig,
    functions: Sequence[RewardFunction] = (),
    environment: Sequence[RewardFunction] = (),
) -> list[RewardFunction]:
    """The reward functions of a run: those of its environment, and given ones, those of
    reward_functions_path, and the reward model; or without any of these the built-in ones; with
    reward_weights. Raises ConfigError."""
    path = config.reward_functions_path
    if functions and path:
        raise ConfigError(
            f"reward_functions_path={path} would do nothing: rewards are given as functions"
        )
    if path:
        functions = load_reward_functions(path, config.reward_functions)
    if config.reward_model_path:
        functions = [*functions, model_reward(config)]
    functions = [*environment, *functions]
    return with_weights(functions or builtin_rewards(config), config.reward_weights)


def model_reward(config: MaxTextConfig) -> RewardFunction:
    """`reward_model`: the scores of the model at reward_model_path. Raises ConfigError."""
    with as_config_error():
        model = RewardModel.load(
            config.reward_model_path, config.tokenizer_path or "", dtype=config.dtype.value
        )

    def score(
        prompts: Sequence[str | Messages], completions: Sequence[str], **columns: Sequence[object]
    ) -> list[float]:
        return model.score(prompts, completions)

    return RewardFunction("reward_model", score)


def builtin_rewards(config: MaxTextConfig) -> list[RewardFunction]:
    """`format_exact`, `format_parts` and `answer`, with the keys of a run."""
    reward_config = RewardKeys.from_config(config)

    def exact(
        prompts: object, completions: Sequence[str], **columns: Sequence[object]
    ) -> list[float]:
        return [format_exact(text, reward_config) for text in completions]

    def parts(
        prompts: object, completions: Sequence[str], **columns: Sequence[object]
    ) -> list[float]:
        return [format_parts(text, reward_config) for text in completions]

    def answer(
        prompts: object, completions: Sequence[str], **columns: Sequence[object]
    ) -> list[float]:
        return answer_rewards(completions, answer_column(columns), reward_config)

    return [
        RewardFunction("format_exact", exact),
        RewardFunction("format_parts", parts),
        RewardFunction("answer", answer),
    ]


def answer_column(columns: Columns) -> Sequence[object]:
    """The column with the reference answers. Raises UserError if there is none."""
    column = next((name for name in ANSWER_COLUMNS if name in columns), None)
    if column is None:
        raise UserError(
            f"the rows have no right answer in a column {', '.join(ANSWER_COLUMNS)}, which "
            "completions are compared with"
        )
    return columns[column]
