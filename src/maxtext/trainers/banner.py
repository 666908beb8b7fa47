"""The reports at the start and at the end of a run, and its sample of text.

`banner` describes model, mesh and plan in numbers. `summarize` logs why a run stopped, and writes
its summary and its plots. `complete` samples a continuation of the prompt from the trained model,
by the engine of `LLM.generate`.
"""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from maxtext.common import hardware, signals
from maxtext.common.errors import ConfigError, MissingExtra
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.configs.derive import run_folder
from maxtext.configs.load import UNBOUNDED_EPOCHS
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.console import start_banner
from maxtext.diagnostics.jsonl import write_summary
from maxtext.diagnostics.plot import LOSS, REWARD, save_loss_png
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.programs import Programs
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.models.counts import parameter_count
from maxtext.models.registry import layers
from maxtext.models.transformer import build_context, implementations
from maxtext.sharding.state import on_device
from maxtext.tokenizers import Tokenizer, load_tokenizer
from maxtext.trainers.hooks import EvaluateLoss, Record
from maxtext.trainers.loop import STOPPED_ELSEWHERE, Hook, Loop
from maxtext.trainers.memory.usage import peak_bytes, step_bytes
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState


def show_banner(context: RunContext, step: jax.stages.Compiled, origin: str) -> None:
    if jax.process_index() == 0:
        start_banner(banner(context, step, origin))


def banner(
    context: RunContext, step: jax.stages.Compiled, origin: str
) -> dict[str, dict[str, str]]:
    """`origin`: where the first state comes from."""
    config = context.config
    mesh = {axis: size for axis, size in context.rules.mesh.shape.items() if size > 1}
    rows, length = config.global_batch_size_to_train_on, config.max_target_length
    schedule = config.lr_schedule_type.value
    return {
        "Model": describe_model(context, step),
        "Implementations": implementations(config, build_context(config, context.rules)),
        "Mesh": {
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "axes": ", ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device",
            **describe_peak(config),
            "dtypes": f"{config.dtype.value} on {config.weight_dtype.value} weights",
        },
        "Plan": {
            "run": run_folder(config),
            "steps": f"{config.steps:,}",
            "tokens a step": f"{rows * length:,} ({rows} x {length})",
            "optimizer": f"{config.opt_type.value}, {schedule} to {config.learning_rate:g}",
            "data": describe_data(context),
            "start": origin,
            "saved": describe_outputs(config),
        },
    }


def describe_model(context: RunContext, step: jax.stages.Compiled) -> dict[str, str]:
    config = context.config
    flops = f"{context.flops_per_token:.3e}"
    model = {
        "name": f"{model_label(config)} ({config.decoder_block.value} blocks)",
        "parameters": f"{parameter_count(context.template.weights):,}",
        "layers": f"{len(layers(config))}, {'scanned' if config.scan_layers else 'unrolled'}",
        "FLOPs a token": f"{flops} in training (matmuls only, causal, no remat)",
    }
    memory = step.memory_analysis()
    if memory is not None:
        arguments = hardware.format_bytes(memory.argument_size_in_bytes)
        temporaries = hardware.format_bytes(memory.temp_size_in_bytes)
        model["memory a device"] = (
            f"{hardware.format_bytes(step_bytes(step).device)} ({arguments} state and batch, "
            f"{temporaries} temporary)"
        )
    return model


def model_label(config: MaxTextConfig) -> str:
    """The name of the model, or the folder that defines it."""
    has_name = config.model_name != "default"
    return config.model_name if has_name else config.load_parameters_path or config.model_name


def describe_peak(config: MaxTextConfig) -> dict[str, str]:
    """The divisor of MFU, if it is known."""
    dtype = config.dtype.value
    peak = hardware.peak_flops(jax.devices()[0].device_kind, dtype)
    return {"peak": f"{peak / 1e12:.0f} TFLOP/s a device in {dtype}, for MFU"} if peak else {}


def describe_data(context: RunContext) -> str:
    from maxtext.input_pipeline.truncation import truncated_share  # imports Grain: takes seconds

    config = context.config
    parts = [config.dataset_type.value]
    if config.num_epoch == UNBOUNDED_EPOCHS:
        parts.append("repeated until the last step")
    share = truncated_share(config, context.row_format)
    if share is not None:
        parts.append(f"use_truncation=true drops {share:.1%} of the tokens")
    return "; ".join(parts)


def describe_outputs(config: MaxTextConfig) -> str:
    if not config.enable_checkpointing:
        return "metrics and plots, no checkpoints"
    if config.enable_continuous_checkpointing:
        period = "at every chance"
    else:
        period = f"every {config.checkpoint_period:,} steps"
        if config.checkpoint_period_minutes:
            period += f", an interim one every {config.checkpoint_period_minutes:g} minutes"
    limit = config.max_num_checkpoints_to_keep
    return f"metrics, plots, and checkpoints {period}" + (
        f", of which {limit} stay" if limit else ""
    )


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
) -> Json:
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


def read_summary(folder: str) -> Json:
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


def check(config: MaxTextConfig) -> None:
    """Raise ConfigError before training if sampling would fail after it."""
    if config.num_labels:
        raise ConfigError(
            f"prompt={config.prompt} would do nothing: a reward model (num_labels=1) writes no text"
        )
    tokenizer = load_tokenizer(config)
    if not config.prompt and not config.add_bos:
        raise ConfigError("prompt is empty and add_bos=false: there is nothing to continue")
    length, max_length = len(prompt_ids(config, tokenizer)), config.trainable_position_size
    if 0 < max_length <= length:
        raise ConfigError(
            f"prompt has {length} tokens, and trainable_position_size={max_length} leaves no "
            "position after it"
        )


def prompt_ids(config: MaxTextConfig, tokenizer: Tokenizer) -> list[int]:
    prefix = [tokenizer.bos_id] if config.add_bos and tokenizer.bos_id is not None else []
    return [*prefix, *tokenizer.encode(config.prompt)]


def complete(context: RunContext, state: TrainState, max_new_tokens: int) -> str:
    """The prompt and its continuation, sampled by the decode_sampling_* keys."""
    config = context.config
    tokenizer = load_tokenizer(config)
    ids = prompt_ids(config, tokenizer)
    if config.trainable_position_size > 0:
        max_new_tokens = min(max_new_tokens, config.trainable_position_size - len(ids))
    eos_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    params = SamplingParams.from_config(
        config,
        max_new_tokens=max_new_tokens,
        seed=config.init_weights_seed,
        stop_token_ids=eos_ids,
    )
    template = context.objective.model_template
    shardings = context.rules.shardings(template.axes, template.weights)
    weights = jax.device_put(context.model_weights(state), jax.tree.map(on_device, shardings))
    programs = Programs(config, template, context.rules, build_context(config, context.rules))
    engine = InferenceEngine(programs, weights, 1, len(ids) + max_new_tokens)
    (new_ids,) = engine.generate([GenerationRequest(ids, params)])
    return tokenizer.decode([*ids, *(token for token in new_ids if token not in eos_ids)])
