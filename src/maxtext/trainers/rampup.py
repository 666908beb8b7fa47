"""Batch-size ramp-up: small batches first, growing by equal increments, each size for its share of the samples.

The source gives batches of the full size; what a small step leaves of one is used by the next step, so no row is lost
or repeated, also across a restart.
"""

from typing import Any

import jax
import numpy as np

from maxtext.input_pipeline import Batch, BatchIterator


def rows_at(config: Any, step: int) -> int:
    """Rows over all processes that step number `step` trains on."""
    if not config.enable_rampup_batch_size or step >= config.rampup_end_step:
        return config.global_batch_size_to_train_on
    rows, past = config.global_batch_size_to_load_start, 0
    while True:
        past += -(-config.rampup_samples_per_increment_to_load // rows)
        if step < past:
            return rows
        rows += config.global_batch_size_to_load_increment


class RampUp(BatchIterator):
    def __init__(self, config: Any, source: BatchIterator):
        self.config, self.source = config, source
        self.step = 0
        self.batch: Batch | None = None
        self.used = 0
        self.before = source.get_state()  # the source's state before `batch`

    def __next__(self) -> Batch:
        wanted = int(rows_at(self.config, self.step)) // jax.process_count()
        parts = []
        while wanted:
            if self.batch is None or self.used == len(self.batch["inputs"]):
                self.before = self.source.get_state()
                self.batch, self.used = next(self.source), 0
            taken = min(wanted, len(self.batch["inputs"]) - self.used)
            parts.append({name: field[self.used : self.used + taken] for name, field in self.batch.items()})
            self.used, wanted = self.used + taken, wanted - taken
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
