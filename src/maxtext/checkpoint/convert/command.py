"""Converts checkpoints between Hugging Face, training and native formats, one tensor at a time."""

import os

from maxtext.checkpoint import steps
from maxtext.checkpoint.open import (
    Checkpoint,
    model_param_infos,
    open_checkpoint,
    parse_dtype,
    save_hf_folder,
    save_native,
    with_max_positions,
)
from maxtext.checkpoint.steps import verify
from maxtext.checkpoint.tensors import CastTensors, Progress
from maxtext.checkpoint.weights import ParamInfo, param_dtypes
from maxtext.common.errors import UserError
from maxtext.common.files import local_path
from maxtext.common.types import Tree
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_python
from maxtext.models.configuration import load
from maxtext.models.transformer import make_template

SHARD_BYTES = 2 * 10**9


def from_folder(
    source: str | os.PathLike,
    out: str | os.PathLike,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Convert a Hugging Face folder to a native one, in its own dtypes or with floats cast to
    `dtype` (see `param_dtypes`).
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.mapping is None:
        raise UserError(f"{source} is a native folder already")
    config, param_infos = unrolled_model(checkpoint)
    weights = checkpoint.weights(config, param_infos, parse_dtype(dtype))
    save_native(
        out,
        config,
        weights,
        checkpoint.hf_assets,
        checkpoint.hf_tensor_names,
        progress,
        SHARD_BYTES,
    )


def from_training(
    source: str | os.PathLike,
    out: str | os.PathLike,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the weights of the newest step of a training checkpoint as a native folder."""
    folder = local_path(source).absolute()
    if not steps.has_steps(folder):
        raise UserError(f"{source} holds no complete checkpoint of training")
    checkpoint = open_checkpoint(folder)
    if problems := verify(checkpoint.path):
        raise UserError(f"{checkpoint.path} is damaged: {problems[0]}; name an older step")
    config, param_infos = unrolled_model(checkpoint)
    weights = checkpoint.weights(config, param_infos)
    cast_dtype = parse_dtype(dtype)
    if cast_dtype is not None:
        weights = CastTensors(weights, param_dtypes(param_infos, cast_dtype))
    save_native(out, config, weights, progress=progress, shard_bytes=SHARD_BYTES)


def to_folder(
    source: str | os.PathLike,
    out: str | os.PathLike,
    dtype: str | None = None,
    progress: Progress | None = None,
    text_only: bool = False,
) -> None:
    """Convert a native folder to one that Hugging Face's libraries load. `text_only` is as in
    `save_hf_folder`.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.mapping is not None:
        raise UserError(f"{source} is a Hugging Face folder already")
    config, param_infos = unrolled_model(checkpoint)
    weights = checkpoint.weights(config, param_infos)
    cast_dtype = parse_dtype(dtype)
    if cast_dtype is not None:
        weights = CastTensors(weights, param_dtypes(param_infos, cast_dtype))
    save_hf_folder(
        out,
        config,
        param_infos,
        weights,
        checkpoint.hf_assets,
        checkpoint.hf_tensor_names,
        progress=progress,
        text_only=text_only,
    )


def unrolled_model(checkpoint: Checkpoint) -> tuple[Tree, dict[str, ParamInfo]]:
    """The configuration of a checkpoint's model, with unrolled layers so that each weight belongs
    to one layer, and its parameters.
    """
    keys = from_python(with_max_positions(checkpoint.settings, {"scan_layers": False}))
    config = load(None, keys, environ={}, devices=Devices(1), model=checkpoint.settings)
    return config, model_param_infos(make_template(config), config)
