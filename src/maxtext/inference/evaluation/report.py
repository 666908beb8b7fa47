"""The JSON report of an evaluation: versions, settings and scores."""

import json
import math
import os
import platform
from importlib import metadata
from typing import Any

import jax

from maxtext.common import files
from maxtext.configs.types import MaxTextConfig

PACKAGES = ("maxtext", "jax", "tokenizers", "lm-eval", "llguidance")
# The keys that decide the scores of a model, besides those that describe it.
SETTINGS = (
    "max_target_length",
    "dtype",
    "weight_dtype",
    "matmul_precision",
    "quantization",
    "quantize_kvcache",
    "attention",
    "tokenizer_path",
    "chat_template_path",
    "lora_input_adapters_path",
    "init_weights_seed",
)


def environment() -> dict[str, str]:
    """Versions of packages that are installed, and the devices."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return versions | {"devices": devices}


def model_settings(path: str, config: MaxTextConfig) -> dict[str, Any]:
    """The model and the keys that decide its scores."""
    values = {key: getattr(config, key) for key in SETTINGS}
    return {"model": path} | {key: getattr(value, "value", value) for key, value in values.items()}


def build_report(
    path: str, config: MaxTextConfig, scores: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The scores of the model at `path`, with the environment, settings and options."""
    settings = model_settings(path, config) | options
    return {**scores, "environment": environment(), "settings": settings}


def write_report(path: str | os.PathLike, report: dict[str, Any]) -> None:
    """Write a report as JSON, in which a number that is not finite is null."""
    text = json.dumps(to_json(report), indent=1, ensure_ascii=False, default=str)
    files.write_text(path, text + "\n")


def to_json(value: Any) -> Any:
    """Dicts, lists, texts, finite numbers and None; functions by their names."""
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.__name__ if callable(value) and hasattr(value, "__name__") else value
