"""Builds the context of a run from its configuration, with the record of its training method."""

from collections.abc import Sequence

import jax

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.models.transformer import build_context, make_template, refuse_absent_kernels
from maxtext.optimizers import build_optimizer
from maxtext.sharding import AxisRules, make_mesh
from maxtext.trainers.adapters import model_context, run_adapters
from maxtext.trainers.methods import method_of
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.trainable import optimized_mask, select


def build_run_context(
    config: MaxTextConfig, devices: Sequence[jax.Device] | None = None
) -> RunContext:
    """The context for the devices of this run, or for given ones, which may be absent: then the
    step can be compiled but not run. Raises ConfigError for keys that only inference supports."""
    reject_inference_keys(config)
    rules = AxisRules.from_config(config, make_mesh(config, devices))
    refuse_absent_kernels(config, build_context(config, rules))
    return run_context_from_rules(config, rules)


def run_context_from_rules(config: MaxTextConfig, rules: AxisRules) -> RunContext:
    """Raises ConfigError if no weight would be trained."""
    adapters, method = run_adapters(config), method_of(config)
    if config.mtp_num_layers and not method.trains_mtp:
        LOGGER.warning(
            "the MTP layers of the model are not trained: %s has no such loss", method.name
        )
    template = make_template(config, model_context(config, rules, adapters=adapters))
    objective = method.objective(config, template, rules)
    trained = optimized_mask(config, objective.template, warn=True)
    if not any(jax.tree.leaves(trained)):
        raise ConfigError(
            "nothing would be trained: trainable_parameters_mask and student_params_to_update "
            "match no weight that this run may change"
        )
    return RunContext(
        rules=rules,
        objective=objective,
        optimizer=build_optimizer(config, select(objective.template.axes, trained)),
        row_format=method.row_format(config),
        batches=method.batches,
        has_eval_loss=method.has_eval_loss,
        adapters=adapters,
    )


def reject_inference_keys(config: MaxTextConfig) -> None:
    """Raise ConfigError for a key that only inference supports."""
    for key, value in (("attention", "paged"), ("use_ragged_attention", True)):
        if getattr(config, key) == value:
            raise ConfigError(
                f"{key}={str(value).lower()} ({config.source(key)}) is about the KV cache of "
                "generation, and training has none: leave it out"
            )
    if config.lora_input_adapters_path:
        raise ConfigError(
            f"lora_input_adapters_path={config.lora_input_adapters_path} "
            f"({config.source('lora_input_adapters_path')}) is for generation: to train an adapter "
            "further, set lora_restore_path"
        )
    quantization = config.quantization.value if config.quantization else ""
    values = {
        "checkpoint_is_quantized": "true" if config.checkpoint_is_quantized else "",
        "save_quantized_params_path": config.save_quantized_params_path,
        "quantization": quantization if quantization in ("int4", "mxfp4") else "",
    }
    for key in filter(values.get, values):
        raise ConfigError(
            f"{key}={values[key]} ({config.source(key)}) is for inference, and training needs "
            "weights in floats: leave it out; quantization=int8 or fp8 trains with int8 or fp8 "
            "matmuls"
        )
