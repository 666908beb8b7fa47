"""The banner of a run: model, mesh and plan, in numbers."""

import jax

from maxtext.common import hardware
from maxtext.configs.derive import run_folder
from maxtext.configs.load import UNBOUNDED_EPOCHS
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.console import start_banner
from maxtext.models.counts import parameter_count
from maxtext.models.registry import layers
from maxtext.models.transformer import build_context, implementations
from maxtext.trainers.memory.usage import step_bytes
from maxtext.trainers.run_context import RunContext


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
