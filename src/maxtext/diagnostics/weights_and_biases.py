"""Weights & Biases, enabled by WANDB_PROJECT or WANDB_MODE in the environment.

There is no configuration key. WANDB_MODE=disabled disables it; the package itself reads WANDB_DIR,
WANDB_RUN_ID, WANDB_RESUME and others. To continue a W&B run after a restart, set WANDB_RUN_ID and
WANDB_RESUME=allow.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from maxtext.common.extras import require
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.record import Record


def is_enabled(environ: Mapping[str, str]) -> bool:
    mode = environ.get("WANDB_MODE", "")
    return mode.lower() != "disabled" and bool(mode or environ.get("WANDB_PROJECT"))


class WeightsAndBiases:
    def __init__(self, config: MaxTextConfig):
        wandb = require(
            "wandb",
            "Weights & Biases (WANDB_PROJECT or WANDB_MODE is set; unset them to go without)",
        )
        # W&B's default is the current folder.
        folder = os.environ.get("WANDB_DIR") or config.metrics_dir
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            name=config.run_name or None, dir=folder, config=config.model_dump(mode="json")
        )

    def write(self, record: Record) -> None:
        values = {
            name: value for name, value in record.items() if name != "step" and value is not None
        }
        self.run.log(values, step=record["step"])

    def close(self) -> None:
        self.run.finish()
