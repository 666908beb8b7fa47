"""The files of a run of reinforcement learning: its rollouts, and the times of its phases.

rollouts.jsonl has a line for each completion. It holds everything that an update needs, so that a
run which stopped between the updates of one batch of rollouts goes on with the same numbers:
Python's JSON writes floats without loss.

The phases of a step are sync (weights to the engine), rollout, score, reward, prepare and update.
Metrics have the seconds of each; enable_tunix_perf_metrics also writes a line for each phase to
spans.jsonl.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxtext.common.files import atomic_writer
from maxtext.trainers.methods.rl.rollout import Rollout

FILE = "rollouts.jsonl"
SPANS_FILE = "spans.jsonl"
FIELDS = (
    "step",
    "prompt",
    "completion",
    "finish_reason",
    "rewards",
    "reward",
    "advantage",
    "prompt_ids",
    "token_ids",
    "log_probs",
    "old_logps",
    "trained_on",
)
TUPLES = ("prompt_ids", "token_ids", "log_probs", "old_logps", "trained_on")


def rollout_to_json(rollout: Rollout) -> str:
    return json.dumps({name: without_nan(getattr(rollout, name)) for name in FIELDS})


def rollout_from_json(line: str) -> Rollout:
    """The rollout of a line. Earlier versions wrote `trained_on` as `learned`, or not at all."""
    values = json.loads(line)
    values.setdefault("trained_on", values.pop("learned", None))
    for name in TUPLES:
        values[name] = None if values[name] is None else tuple(values[name])
    rewards = {name: with_nan(value) for name, value in values["rewards"].items()}
    return Rollout(**values | {"rewards": rewards, "reward": with_nan(values["reward"])})


def without_nan(value: object) -> object:
    """`value` with None in place of nan, which JSON does not have."""
    if isinstance(value, Mapping):
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

    def append(self, rollouts: Sequence[Rollout]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{rollout_to_json(rollout)}\n" for rollout in rollouts)

    def read(self, step: int) -> list[Rollout]:
        """The rollouts of a step."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [rollout_from_json(line) for line in lines if json.loads(line)["step"] == step]


class Clock:
    """Phases of a step, in order: the seconds of each, from the end of the one before."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.started = self.last = time.perf_counter()
        self.phases: list[tuple[str, float, float]] = []  # name, seconds since the start, seconds

    def stop(self, phase: str) -> None:
        """A phase ends now."""
        now = time.perf_counter()
        self.phases.append((phase, self.last - self.started, now - self.last))
        self.last = now

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for phase, _, seconds in self.phases:
            metrics[f"{phase}_seconds"] = metrics.get(f"{phase}_seconds", 0.0) + seconds
        return metrics


class SpanLog:
    """spans.jsonl: a line for each phase, with its start in seconds since the epoch. Lines of steps
    from `step` on, of a process that ended before its checkpoint, are dropped."""

    def __init__(self, folder: str, step: int):
        self.path = Path(folder) / SPANS_FILE
        drop_later_steps(self.path, step)

    def append(self, step: int, clock: Clock) -> None:
        lines = [
            {"step": step, "name": phase, "start": clock.started_at + start, "seconds": seconds}
            for phase, start, seconds in clock.phases
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
