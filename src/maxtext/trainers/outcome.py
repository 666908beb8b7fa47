"""The end of a run: why it stopped, its summary and its plots."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from maxtext.common import signals
from maxtext.common.errors import MissingExtra
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.plot import LOSS, REWARD, save_loss_png
from maxtext.diagnostics.summary import write_summary
from maxtext.models.counts import parameter_count
from maxtext.trainers.hooks import EvaluateLoss, Record
from maxtext.trainers.loop import STOPPED_ELSEWHERE, Hook, Loop
from maxtext.trainers.memory.usage import peak_bytes
from maxtext.trainers.run_context import RunContext

Points = list[tuple[int, float]]  # (step, value)
SUMMARY = "summary.json"


def stop_reason(loop: Loop) -> str:
    # A request to stop may arrive after the last step.
    is_late = loop.step >= loop.steps and loop.stop_reason in (*signals.NAMES, STOPPED_ELSEWHERE)
    return "all steps done" if loop.stop_reason is None or is_late else loop.stop_reason


def stop_signal(loop: Loop) -> int | None:
    """The signal that ended a run before its last step; SIGTERM if another process received it."""
    if loop.step >= loop.steps:
        return None
    if loop.stop_reason in signals.NAMES:
        return loop.signal
    return signal.SIGTERM if loop.stop_reason == STOPPED_ELSEWHERE else None


def summarize(
    context: RunContext,
    loop: Loop,
    hooks: Sequence[Hook],
    folder: str,
    seconds: float,
    failure: Exception | None,
) -> dict[str, Any]:
    """Log the outcome, and write summary.json and plots to `folder`.

    Losses are those of the whole run, also before a resume; times and memory are those of this
    process.
    """
    config = context.config
    record = next(hook for hook in hooks if isinstance(hook, Record))
    losses = record.losses
    eval_losses = record.earlier_eval_losses + [
        point for hook in hooks if isinstance(hook, EvaluateLoss) for point in hook.points
    ]
    summary = {
        "run_name": config.run_name,
        "steps": loop.step,
        "stopped": str(failure) if failure else stop_reason(loop),
        "parameters": parameter_count(context.template.weights),
        "seconds": round(seconds, 3),
        # An upper bound of the time that steps waited for data: while the host waited, the device
        # may have been running a step.
        "data_wait": round(loop.data_seconds / loop.step_seconds, 5) if loop.step_seconds else None,
        "peak_memory_bytes": peak_bytes(),
        "first_loss": losses[0][1] if losses else None,
        "final": record.last,
        "eval_loss": eval_losses[-1][1] if eval_losses else None,
    }
    message = f"stopped after {loop.step} steps: {summary['stopped']}"
    if failure is None and stop_signal(loop) and config.enable_checkpointing:
        name = "" if config.has_lasting_name else f" with run_name={config.run_name}"
        message += f"; the same command{name} goes on"
    if summary["data_wait"] is not None:
        message += f"; waited for data {summary['data_wait']:.2%} of the time"
    LOGGER.info("%s", message)
    if jax.process_index() == 0:
        write_summary(os.path.join(folder, SUMMARY), summary)
        if losses:
            try:
                plots = save_plots(config, folder, losses, eval_losses, record.rewards)
                LOGGER.info("wrote %s to %s", " and ".join([SUMMARY, *plots]), folder)
            except MissingExtra as error:
                LOGGER.info("wrote %s to %s; %s", SUMMARY, folder, error)
    return summary


def read_summary(folder: str) -> dict[str, Any]:
    """The summary of an earlier process of the run; empty if there is none."""
    path = Path(folder) / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def save_plots(
    config: MaxTextConfig, folder: str, losses: Points, eval_losses: Points, rewards: Points
) -> list[str]:
    """Write loss.png, and reward.png of reinforcement learning, to `folder`. Returns their
    names."""
    plots: dict[str, Any] = {"loss.png": (losses, eval_losses, LOSS)}
    if rewards:
        plots["reward.png"] = (rewards, [], REWARD)
    for name, (points, evaluations, quantity) in plots.items():
        steps, values = zip(*points, strict=True)
        path = os.path.join(folder, name)
        save_loss_png(path, steps, values, evaluations, title=config.run_name, quantity=quantity)
    return list(plots)
