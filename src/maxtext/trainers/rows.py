"""How many rows each step sees, from batches of whatever size the source loads.

Batch-size ramp-up grows by equal increments, each size until its share of the samples is used; and a fractional
per_device_batch_size trains on fewer rows than a source loads at once. What a step leaves of a loaded batch is used by
the next, so no row is lost or repeated, also across a restart.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from maxtext.configs.derive import rampup_stages
from maxtext.input_pipeline import Batch, BatchIterator


def rows_at(config: Any, step: int) -> int:
    """Rows that step number `step` trains on."""
    past = 0
    for rows, steps in rampup_stages(config) if config.enable_rampup_batch_size else ():
        past += steps
        if step < past:
            return rows
    return config.global_batch_size_to_train_on


def row_counts(config: Any) -> list[int]:
    """All sizes that rows_at gives, the full one last."""
    full = config.global_batch_size_to_train_on
    if not config.enable_rampup_batch_size:
        return [full]
    return [*(rows for rows, steps in rampup_stages(config) if steps), full]


class Rebatch(BatchIterator):
    """Batches of `rows(step)` rows. With `keep_last` the rows that are left at the end make one more batch, filled up
    with padding."""

    def __init__(self, source: BatchIterator, rows: Callable[[int], int], keep_last: bool = False):
        self.source, self.rows, self.keep_last = source, rows, keep_last
        self.step = 0
        self.batch: Batch | None = None
        self.used = 0
        self.before = source.get_state()  # the source's state before `batch`

    def __next__(self) -> Batch:
        wanted = self.rows(self.step)
        parts: list[Batch] = []
        have = 0
        while have < wanted:
            if self.batch is None or self.used == len(self.batch["inputs"]):
                before = self.source.get_state()
                try:
                    self.batch, self.used, self.before = next(self.source), 0, before
                except StopIteration:
                    if not (self.keep_last and parts):
                        raise
                    parts.append({name: np.zeros_like(field[:1]) for name, field in parts[0].items()})
                    parts += [parts[-1]] * (wanted - have - 1)
                    break
            part = {name: field[self.used : self.used + wanted - have] for name, field in self.batch.items()}
            parts.append(part)
            self.used, have = self.used + len(part["inputs"]), have + len(part["inputs"])
        self.step += 1
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def get_state(self) -> dict[str, Any]:
        return {"step": self.step, "used": self.used, "started": self.batch is not None, "source": self.before}

    def set_state(self, state: dict[str, Any]) -> None:
        self.step, self.used, self.before = state["step"], state["used"], state["source"]
        self.source.set_state(self.before)
        self.batch = next(self.source) if state["started"] else None

    def reset(self) -> None:
        self.source.reset()
        self.step, self.used, self.batch, self.before = 0, 0, None, self.source.get_state()

    def close(self) -> None:
        self.source.close()
