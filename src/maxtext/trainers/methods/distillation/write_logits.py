"""Writes the largest logits of a model over its training data, for `offline_data_dir`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.open import Checkpoint
from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import Batch, DataStreams
from maxtext.input_pipeline.teacher_logits import (
    TOP_K_FIELDS,
    create_folder,
    has_part,
    part_path,
    write_part,
)
from maxtext.sharding import AxisRules, make_mesh
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_weights
from maxtext.trainers.compilation.compile import lower
from maxtext.trainers.data_loader import open_train_streams, shard_batch
from maxtext.trainers.methods.distillation.teacher import teacher_config
from maxtext.trainers.model_losses import bind_model, map_tiles, training_inputs
from maxtext.trainers.objective import ModelObjective
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.shardings import with_shardings
from maxtext.trainers.trainable import has_adapters

PART_TOKENS = 2**15  # at least; a part has whole batches


def write_logits(
    config: MaxTextConfig, folder: Path, top_k: int, checkpoint: Checkpoint | None = None
) -> tuple[int, int]:
    """Write `steps` batches, or all the data, with the logits of the model at load_parameters_path
    or, in the configuration of a distillation, of its teacher. Parts that exist are skipped.
    Returns the numbers of parts and of rows that were written. `checkpoint`: load_parameters_path,
    if it is open."""
    if config.teacher_overrides:
        config = teacher_config(config, AxisRules.from_config(config, make_mesh(config)))
        checkpoint = None
    if not 1 <= top_k <= config.vocab_size:
        raise ConfigError(f"--top-k {top_k} is not between 1 and vocab_size={config.vocab_size}")
    if jax.process_count() > 1:
        raise ConfigError("distill-logits runs in one process")
    if not config.load_parameters_path:
        raise ConfigError("there is no teacher: set load_parameters_path=DIR")
    if config.source("num_epoch").kind == "derived":  # repeated rows have the same logits
        config = config.model_copy(update={"num_epoch": 1})
    context = frozen_context(config)
    create_folder(
        folder,
        {
            "top_k": top_k,
            "max_target_length": config.max_target_length,
            "vocab_size": config.vocab_size,
            "rows_of_a_batch": config.global_batch_size_to_train_on,
            "data_shuffle_seed": config.data_shuffle_seed,
        },
    )
    streams = open_train_streams(context)
    program: Callable[[Batch], Batch] | None = None
    num_parts = num_rows = 0
    try:
        for number, batches in enumerate(parts(config, streams)):
            path = part_path(folder, number)
            if has_part(path, np.concatenate([batch["inputs"] for batch in batches])):
                continue
            if program is None:
                weights = initial_weights(context, checkpoint)
                program = compile_top_k(context, weights, streams, top_k)
            rows = [batch | program(batch) for batch in batches]
            merged = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            write_part(path, merged)
            num_parts, num_rows = num_parts + 1, num_rows + len(merged["inputs"])
            LOGGER.info("wrote %s, %d rows", path, len(merged["inputs"]))
    finally:
        streams.close()
    return num_parts, num_rows


def frozen_context(config: MaxTextConfig) -> RunContext:
    """The context of a run that changes no weight: those that layers cast are stored as cast. With
    adapters, the base is stored in weight_dtype."""
    context = build_run_context(config)
    if has_adapters(config):
        return context
    assert isinstance(context.objective, ModelObjective)
    objective = replace(context.objective, template=context.template.for_cast)
    return replace(context, objective=objective)


def parts(config: MaxTextConfig, streams: DataStreams) -> Iterator[list[Batch]]:
    """The batches of each part."""
    tokens = config.global_batch_size_to_train_on * config.max_target_length
    size = max(PART_TOKENS // tokens, 1)
    batches: list[Batch] = []
    for step, batch in enumerate(streams):
        if step == config.steps:
            break
        batches.append(batch)
        if len(batches) == size:
            yield batches
            batches = []
    if batches:
        yield batches


def compile_top_k(
    context: RunContext, weights: Tree, streams: DataStreams, top_k: int
) -> Callable[[Batch], Batch]:
    """A function from a batch to its TOP_K_FIELDS, [rows, S, K]."""
    config, rows = context.config, context.config.global_batch_size_to_train_on

    def run(weights: Tree, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        model = bind_model(config, context.template, weights)
        x, _ = model.run(batch["inputs"], training_inputs(config, batch, None))

        def tile(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits, indices = jax.lax.top_k(model.logits(model.final_norm(x)), top_k)
            return logits.astype(jnp.float16), indices.astype(jnp.int32)

        fields = map_tiles(tile, config.num_vocab_tiling, x)
        return dict(zip(TOP_K_FIELDS, fields, strict=True))

    shardings = context.shardings
    jitted = jax.jit(run, out_shardings=shardings.replicated)
    abstract = with_shardings(context.template.weights, shardings.weights)
    program = lower(context, jitted, abstract, context.abstract_batch(rows)).compile()

    def compute(batch: Batch) -> Batch:
        fields = program(weights, shard_batch(context, batch, streams, rows))
        return {name: np.asarray(field) for name, field in fields.items()}

    return compute
