"""Weights & Biases, enabled by enable_wandb, or by WANDB_PROJECT or WANDB_MODE in the environment.

WANDB_MODE=disabled disables it; the package itself reads WANDB_DIR, WANDB_RUN_ID, WANDB_RESUME and
others. To continue a W&B run after a restart, set WANDB_RUN_ID and WANDB_RESUME=allow.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from maxtext.common.extras import require
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.record import Record


def is_enabled(config: MaxTextConfig, environ: Mapping[str, str]) -> bool:
    mode = environ.get("WANDB_MODE", "")
    asks = config.enable_wandb or mode or environ.get("WANDB_PROJECT")
    return mode.lower() != "disabled" and bool(asks)


def project(config: MaxTextConfig, environ: Mapping[str, str]) -> str | None:
    """The project of enable_wandb; None leaves it to WANDB_PROJECT, which replaces the default."""
    is_default = config.source("wandb_project_name").kind == "default"
    if not config.enable_wandb or (is_default and environ.get("WANDB_PROJECT")):
        return None
    return config.wandb_project_name or None


class WeightsAndBiases:
    def __init__(self, config: MaxTextConfig, environ: Mapping[str, str] = os.environ):
        cause = (
            "enable_wandb=true"
            if config.enable_wandb
            else "WANDB_PROJECT or WANDB_MODE is set; unset them to go without"
        )
        wandb = require("wandb", f"Weights & Biases ({cause})")
        # W&B's default is the current folder.
        folder = environ.get("WANDB_DIR") or config.metrics_dir
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=project(config, environ),
            name=config.wandb_run_name or config.run_name or None,
            dir=folder,
            config=config.model_dump(mode="json"),
        )

    def write(self, record: Record) -> None:
        values = {
            name: value for name, value in record.items() if name != "step" and value is not None
        }
        self.run.log(values, step=record["step"])

    def close(self) -> None:
        self.run.finish()
