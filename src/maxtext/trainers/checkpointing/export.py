"""A trained model for inference, and the folders that a finished run leaves."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from maxtext.adapters.peft_folder import write_adapter
from maxtext.checkpoint.open import (
    Checkpoint,
    model_param_infos,
    save_hf_folder,
    save_native,
)
from maxtext.checkpoint.quantized import load_base
from maxtext.checkpoint.weights import ModelWeights, load_weights
from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.llm import LLM
from maxtext.layers.lora import split_adapter
from maxtext.layers.parameters import Template
from maxtext.models import hf_registry
from maxtext.models.transformer import make_template
from maxtext.sharding import use_rules
from maxtext.trainers.adapters import trained_adapter
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState
from maxtext.trainers.trainable import has_adapters

# In the folder of a run
ADAPTER_FOLDER, STUDENT_FOLDER, REWARD_FOLDER = "adapter", "student", "reward_model"


def trained_llm(context: RunContext, state: TrainState, checkpoint: Checkpoint | None) -> LLM:
    """The model of a run with its weights, which the LLM owns from here on. `checkpoint`: the
    folder that the run started from, for the tokenizer and the files of Hugging Face.

    Its layers are unrolled, as those of `LLM.load`, so that both compute the same bits."""
    weights = context.model_weights(state)
    config = context.config.model_copy(update={"scan_layers": False})
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
    if context.config.scan_layers and is_scanned(weights, template):
        weights = unroll(context, weights, config, template)
    llm = LLM(config, template, weights, checkpoint, adapters=adapters)
    if source is not None:  # save_hf writes the dtypes of the folder
        llm.disk_dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
    return llm


def is_scanned(weights: Tree, template: Template) -> bool:
    """Whether weights do not have the tree of an unrolled model."""
    paths = [
        {path for path, _ in jax.tree.leaves_with_path(tree)}
        for tree in (weights, template.weights)
    ]
    return paths[0] != paths[1]


def unroll(context: RunContext, weights: Tree, config: MaxTextConfig, template: Template) -> Tree:
    """Weights of the scanned model of a run as those of `template`, layer by layer."""
    scanned = make_template(context.config)
    source = ModelWeights(weights, model_param_infos(scanned, context.config))

    def load(path: Any, params: Mapping[str, Any], leaf: Any, sharding: Any, _: int) -> jax.Array:
        [name] = params  # a leaf of an unrolled model is one parameter
        return jax.device_put(source.get(name), sharding)

    with use_rules(context.rules):
        return load_weights(
            source,
            model_param_infos(template, config),
            template,
            shardings=context.rules.shardings(template.axes, template.weights),
            load=load,
        )


def save_results(
    context: RunContext, state: TrainState, folder: str, checkpoint: Checkpoint | None
) -> None:
    """Write what the checkpoints of a finished run do not hold in a form to be loaded: the adapter,
    a student whose weights are computed from its teacher's, or a reward model. `checkpoint`: as of
    `trained_llm`.
    """
    if has_adapters(context.config):
        save_trained_adapter(context, state.weights, folder, checkpoint)
    elif context.computes_weights:
        save_model(context, state, Path(folder) / STUDENT_FOLDER, checkpoint)
    elif context.config.num_labels:
        save_model(context, state, Path(folder) / REWARD_FOLDER, checkpoint)


def save_trained_adapter(
    context: RunContext, weights: Tree, folder: str, checkpoint: Checkpoint | None
) -> None:
    """Write the adapter of a run as a PEFT folder, in place of an earlier one."""
    adapter, config = trained_adapter(context, weights), context.config
    if jax.process_index():
        return
    names = frozenset[str]() if checkpoint is None else checkpoint.hf_tensor_names
    with replace_folder(Path(folder) / ADAPTER_FOLDER) as path:
        write_adapter(path, adapter, config, config.load_parameters_path, names)


def save_model(
    context: RunContext, state: TrainState, folder: Path, checkpoint: Checkpoint | None
) -> None:
    """Write the weights of a run's model in place of an earlier folder: as a native one, or a
    reward model for transformers, if that has a class for it."""
    weights = context.model_weights(state)
    if context.shardings.spans_processes:
        weights = jax.jit(lambda tree: tree, out_shardings=context.shardings.replicated)(weights)
    if jax.process_index():
        return
    config = context.config
    param_infos = model_param_infos(context.objective.model_template, config)
    source = ModelWeights(weights, param_infos)
    hf_assets = () if checkpoint is None else checkpoint.hf_assets
    hf_tensor_names = frozenset() if checkpoint is None else checkpoint.hf_tensor_names
    with replace_folder(folder) as path:
        if config.num_labels and has_classifier(config):
            save_hf_folder(path, config, param_infos, source, hf_assets)
        else:
            save_native(path, config, source, hf_assets, hf_tensor_names)


def has_classifier(config: MaxTextConfig) -> bool:
    try:
        return hf_registry.classifier_name(hf_registry.mapping_for(config)) is not None
    except UserError:  # the family has no HF architecture
        return False


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """A folder to write, which becomes `path`, in place of an earlier one, once it is complete."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    yield new
    shutil.rmtree(path, ignore_errors=True)
    new.rename(path)
    LOGGER.info("wrote %s", path)
