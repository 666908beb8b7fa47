"""Weights & Biases, asked for in its own way: by WANDB_PROJECT or WANDB_MODE in the environment.

There is no key for it. WANDB_MODE=disabled turns it off again; WANDB_DIR, WANDB_RUN_ID,
WANDB_RESUME and the rest are read by the package itself. To continue one W&B run after a restart,
set WANDB_RUN_ID and WANDB_RESUME=allow.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from maxtext.common.extras import require
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.record import Record


def wanted(environ: Mapping[str, str]) -> bool:
    mode = environ.get("WANDB_MODE", "")
    return mode.lower() != "disabled" and bool(mode or environ.get("WANDB_PROJECT"))


class WeightsAndBiases:
    def __init__(self, config: MaxTextConfig):
        wandb = require(
            "wandb",
            "Weights & Biases (WANDB_PROJECT or WANDB_MODE is set; unset them to go without)",
        )
        folder = (
            os.environ.get("WANDB_DIR") or config.metrics_dir
        )  # its own default is the current folder
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
