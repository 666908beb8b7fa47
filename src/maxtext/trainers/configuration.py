"""The configuration of a training run, with the default that depends on the weights that it starts
from."""

import os

from maxtext.checkpoint.open import Checkpoint, open_checkpoint
from maxtext.configs import ledger
from maxtext.configs.derive import Devices, visible_devices
from maxtext.configs.load import base_values
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.startup import process_settings
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.loading import has_bfloat16_weights
from maxtext.models.configuration import load
from maxtext.trainers.methods.rl.device_split import trainer_devices
from maxtext.trainers.trainable import has_adapters


def load_run(
    path: str | os.PathLike | None,
    overrides: Layer,
    checkpoint: Checkpoint | None = None,
    devices: Devices | None = None,
) -> MaxTextConfig:
    """As `models.configuration.load`, for a run. `checkpoint`: the folder that defines its model.

    The base of adapters is frozen, so it needs no float32 copy: weight_dtype defaults to bfloat16
    if the weights at load_parameters_path are bfloat16. Raises ConfigError if the model needs keys
    that do not act. In reinforcement learning the trainer may have only some of `devices`.
    """
    model = checkpoint.model_layer if checkpoint else None
    devices = devices or visible_devices(process_settings(path, overrides).hardware)
    devices = trainer_devices(path, overrides, devices)
    config = load(path, overrides, devices=devices, model=model)
    ledger.refuse_unsupported_model(config, base_values())
    weights = config.load_parameters_path
    if not (weights and has_adapters(config)) or config.source("weight_dtype").kind != "default":
        return config
    if not has_bfloat16_weights(checkpoint or open_checkpoint(weights), config):
        return config
    frozen = {"weight_dtype": Setting("bfloat16", Source("derived", "the frozen base"))}
    return load(path, overrides | frozen, devices=devices, model=model)
