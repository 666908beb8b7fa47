"""A trained model for inference, and the folder of a trained adapter."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax

from maxtext.checkpoint.open import Checkpoint, model_param_infos
from maxtext.checkpoint.peft_folder import write_adapter
from maxtext.checkpoint.quantized import load_base
from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.inference.llm import LLM
from maxtext.layers.lora import split_adapter
from maxtext.models.transformer import make_template
from maxtext.sharding import use_rules
from maxtext.trainers.init_adapters import trained_adapter
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.trainable import has_adapters

ADAPTER_FOLDER = "adapter"  # in the folder of a run


def trained_llm(context: RunContext, weights: Any, checkpoint: Checkpoint | None) -> LLM:
    """The model of a run with its weights, which the LLM owns from here on. `checkpoint`: the
    folder that the run started from, for the tokenizer and the files of Hugging Face."""
    config = context.config
    template = make_template(config)
    param_infos = model_param_infos(template, config)
    source = checkpoint.weights(config, param_infos) if checkpoint else None
    adapters = {}
    if has_adapters(config):
        adapter = trained_adapter(context, weights)
        weights = split_adapter(weights)[0]
        if config.lora_weight_qtype is not None or adapter.saved:
            if source is None:
                raise UserError("the base of this adapter is no folder, so there is none to serve")
            with use_rules(context.rules):
                weights = load_base(source, param_infos, template, context.rules)
        adapters = {ADAPTER_FOLDER: adapter}
    llm = LLM(config, template, weights, checkpoint, adapters=adapters)
    if source is not None:  # save_hf writes the dtypes of the folder
        llm.disk_dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
    return llm


def save_trained_adapter(context: RunContext, weights: Any, folder: str) -> None:
    """Write the adapter of a run as a PEFT folder, in place of an earlier one."""
    adapter = trained_adapter(context, weights)
    if jax.process_index():
        return
    path = Path(folder) / ADAPTER_FOLDER
    new = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    write_adapter(new, adapter, context.config, context.config.load_parameters_path)
    shutil.rmtree(path, ignore_errors=True)
    new.rename(path)
    LOGGER.info("wrote the adapter to %s", path)
