"""rollouts.jsonl in the folder of a run: a line for each completion of reinforcement learning.

It holds everything that an update needs, so that a run which stopped between the updates of one
batch of rollouts goes on with the same numbers: Python's JSON writes floats without loss.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maxtext.common.files import atomic_writer

FILE = "rollouts.jsonl"


@dataclass(frozen=True)
class ScoredRollout:
    """A completion, its rewards and advantage. `log_probs` are those of the engine, `old_logps`
    those of the policy, of each of its tokens at the sampling temperature."""

    step: int
    prompt: Any
    completion: str
    finish_reason: str
    rewards: dict[str, float]  # of each function; nan: not scored
    reward: float
    advantage: float
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    old_logps: tuple[float, ...]
    learned: tuple[bool, ...] | None = None  # which of `token_ids` are sampled; None: all

    def to_json(self) -> str:
        return json.dumps({name: without_nan(value) for name, value in asdict(self).items()})

    @classmethod
    def from_json(cls, line: str) -> "ScoredRollout":
        values = json.loads(line)
        for name in ("prompt_ids", "token_ids", "log_probs", "old_logps"):
            values[name] = tuple(values[name])
        if values.get("learned") is not None:
            values["learned"] = tuple(values["learned"])
        rewards = {name: with_nan(value) for name, value in values["rewards"].items()}
        return cls(**values | {"rewards": rewards, "reward": with_nan(values["reward"])})


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nan(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def with_nan(value: float | None) -> float:
    return math.nan if value is None else value


def drop_later_steps(path: Path, step: int) -> None:
    """Keep the lines of a JSONL file, if there is one, of steps before `step`."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    # A line without an end was being written when its process was killed.
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    earlier = [line for line in lines if json.loads(line)["step"] < step]
    if "".join(earlier) != text:
        with atomic_writer(path, "w") as file:
            file.writelines(earlier)


class RolloutLog:
    """The file of a run that has done `step` steps. Lines of later steps, of a process that ended
    before its checkpoint, are dropped."""

    def __init__(self, folder: str, step: int):
        self.path = Path(folder) / FILE
        drop_later_steps(self.path, step)

    def append(self, rollouts: Sequence[ScoredRollout]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{rollout.to_json()}\n" for rollout in rollouts)

    def read(self, step: int) -> list[ScoredRollout]:
        """The rollouts of a step."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [ScoredRollout.from_json(line) for line in lines if json.loads(line)["step"] == step]
