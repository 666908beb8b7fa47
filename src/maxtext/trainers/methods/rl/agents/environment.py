"""The environment of a conversation in reinforcement learning.

An environment belongs to one conversation. `reset` returns the messages of the prompt of a row;
`step` takes the model's text and returns the messages that follow, a reward (None: the step has
none) and whether the conversation is over. The reward of a conversation is the sum over its steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from maxtext.common.types import Json
from maxtext.input_pipeline.formats import UnusableRecord
from maxtext.input_pipeline.row_forms import refuse_media

Message = Json
Row = Json  # of the data: columns by name
Step = tuple[Sequence[Message], float | None, bool]


class Environment(Protocol):
    def reset(self, row: Row) -> Sequence[Message]:
        """The messages that begin the conversation of a row."""

    def step(self, text: str) -> Step:
        """(messages, reward, done) after a turn of the model. The messages of a last step are not
        used."""


EnvironmentFactory = Callable[[], Environment]


class InvalidResult(Exception):
    """An environment returned a value of the wrong form."""


def check_messages(messages: object, method: str) -> list[Message]:
    """The messages that a method of an environment returned. Raises InvalidResult."""
    if not isinstance(messages, list | tuple):
        raise InvalidResult(
            f"{method} returned {type(messages).__name__} instead of a list of messages"
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidResult(f"{method} returned the message {message!r}, which has no role")
        if message.get("content") is None and "tool_calls" not in message:
            raise InvalidResult(f"{method} returned the message {message!r}, which has no content")
    try:
        refuse_media(messages)
    except UnusableRecord as error:
        raise InvalidResult(f"{method} returned messages that are no text: {error}") from None
    return [dict(message) for message in messages]


def check_start(messages: object) -> list[Message]:
    """The messages that `reset` returned. Raises InvalidResult."""
    if not (checked := check_messages(messages, "reset")):
        raise InvalidResult("reset returned no message")
    return checked


def check_step(result: object) -> Step:
    """The result of `step`, checked. Raises InvalidResult."""
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise InvalidResult("step returned something else than (messages, reward, done)")
    messages, reward, done = result
    try:
        reward = None if reward is None else float(reward)
    except (TypeError, ValueError):
        raise InvalidResult(f"step returned the reward {reward!r}, which is no number") from None
    if reward is not None and not math.isfinite(reward):
        raise InvalidResult(f"step returned the reward {reward}")
    return [] if done else check_messages(messages, "step"), reward, bool(done)


class SingleTurn:
    """The conversation of a row without an environment: it ends after the first turn."""

    def reset(self, row: Row) -> Sequence[Message]:
        return prompt_messages(row["prompt"])

    def step(self, text: str) -> Step:
        return (), None, True


def prompt_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """The messages of a prompt; a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
