"""Times of the phases of a step of reinforcement learning.

The phases are sync (weights to the engine), rollout, score, reward, prepare and update. Metrics
have the seconds of each; enable_tunix_perf_metrics also writes a line for each phase to spans.jsonl
in the run's folder.
"""

import json
import time
from pathlib import Path

from maxtext.trainers.methods.rl.rollout_log import drop_later_steps

FILE = "spans.jsonl"


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
        self.path = Path(folder) / FILE
        drop_later_steps(self.path, step)

    def append(self, step: int, clock: Clock) -> None:
        lines = [
            {"step": step, "name": phase, "start": clock.started_at + start, "seconds": seconds}
            for phase, start, seconds in clock.phases
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
