"""Settings as MaxText's post-training files and command lines spell them.

A mapping `lora:`, `dpo:` or `rl:` groups keys that are flat here, and `lora.lora_rank=8` sets one
of them on a command line. Some keys had or have other names.
"""

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs.provenance import Layer, Setting

SECTIONS = ("lora", "dpo", "rl")
RENAMED = {
    "hf_lora_adapter_path": ("lora_restore_path",),
    "rollout_async_scheduling": ("async_scheduling",),
    "micro_batch_size": ("train_micro_batch_size", "rollout_micro_batch_size"),
    "algo": ("dpo_loss_type",),
    "hf_subset": ("hf_name",),
}
RENAMED_VALUES = {("algo", "dpo"): "sigmoid"}
# A value that stands for the default, and that the type of the key does not have.
EMPTY = {
    "lora_tile_size": None,
    "constant_bound_config": "",
    "multi_tier_checkpointing_backup_interval_minutes": None,
}
# Keys without a meaning here, with the value that asks for nothing.
WITHOUT_MEANING = {
    "rollout_subslice_shape": "",
    "rollout_enable_single_controller": False,
    "debug": False,
    "hf_subset": "",
}
VLLM_FILE = "vllm_config_path"


def flatten(layer: Layer) -> Layer:
    """The settings by the keys of base.yml. Raises ConfigError if two spellings of a key have
    different values."""
    flat: Layer = {}

    def add(key: str, value: object, setting: Setting) -> None:
        if key in EMPTY and value == EMPTY[key]:
            return
        if key in flat and flat[key].value != value:
            raise ConfigError(
                f"{key} is set twice with different values, {flat[key].value!r} and {value!r} "
                f"({setting.source}): keep one"
            )
        flat[key] = Setting(value, setting.source)

    for key, setting in layer.items():
        for name, value in expand(key, setting.value):
            if name == VLLM_FILE:
                LOGGER.info("%s is not read: rollouts use the engine of this package", VLLM_FILE)
            elif name not in WITHOUT_MEANING or value != WITHOUT_MEANING[name]:
                for new_name in RENAMED.get(name, (name,)):
                    add(new_name, RENAMED_VALUES.get((name, str(value)), value), setting)
    return flat


def expand(key: str, value: object) -> list[tuple[str, object]]:
    """The settings that a key stands for."""
    if key in SECTIONS and isinstance(value, dict):
        return [(str(name), inner) for name, inner in value.items()]
    if key == "debug" and isinstance(value, dict) and set(value) == {"rl"}:
        return [("rl", value["rl"])]
    return [(key, value)]


def flat_name(key: str) -> str:
    """The flat key of `lora.lora_rank`; other keys are returned as they are."""
    section, dot, inner = key.partition(".")
    if dot and section == "debug":
        return inner if inner == "rl" else key
    return inner if dot and section in SECTIONS else key
