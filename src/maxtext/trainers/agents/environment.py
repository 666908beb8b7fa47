"""What a conversation of reinforcement learning talks to.

An environment belongs to one conversation. `reset` returns the messages of the prompt of a row;
`step` takes what the model wrote and returns the messages that follow, a reward and whether the
conversation is over. The reward of a conversation is the sum of those of its steps; None: the step
has none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Message = dict[str, Any]
Step = tuple[Sequence[Message], float | None, bool]


class Environment(Protocol):
    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The messages that begin the conversation of a row."""

    def step(self, text: str) -> Step:
        """(messages, reward, done) after a turn of the model. The messages of a last step are not
        used."""


EnvironmentFactory = Callable[[], Environment]


class SingleTurn:
    """The conversation of a row without an environment: it ends after the first turn."""

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        return prompt_messages(row["prompt"])

    def step(self, text: str) -> Step:
        return (), None, True


def prompt_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """The messages of a prompt; a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
