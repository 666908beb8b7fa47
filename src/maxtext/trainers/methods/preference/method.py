"""Preference optimization as a method: pairs of completions, and the losses of dpo_loss_type."""

from maxtext.checkpoint.open import Checkpoint
from maxtext.configs.derive import run_folder
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.row_formats import PREFERENCE_PAIRS
from maxtext.layers.parameters import Template
from maxtext.sharding import AxisRules
from maxtext.trainers.adapters import base_template
from maxtext.trainers.data_loader import AddFields
from maxtext.trainers.methods.method import Method
from maxtext.trainers.methods.preference.objective import PreferenceObjective
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState


def preference_objective(
    config: MaxTextConfig, template: Template, rules: AxisRules
) -> PreferenceObjective:
    return PreferenceObjective(config, template, base_template=base_template(config, rules))


def add_reference_logps(
    context: RunContext, state: TrainState, step: int, checkpoint: Checkpoint | None
) -> AddFields:
    """Adds the log-probabilities of the reference, if they are computed before training."""
    from maxtext.trainers.checkpointing.init_state import initial_weights
    from maxtext.trainers.methods.preference.reference_logps import load_or_compute

    if not context.objective.row_fields:
        return lambda batch: batch
    weights = state.weights if step == 0 else initial_weights(context, checkpoint)
    return load_or_compute(context, run_folder(context.config), weights).add_fields


PREFERENCE = Method(
    "preference optimization",
    is_chosen=lambda config: config.use_dpo,
    row_format=lambda config: PREFERENCE_PAIRS,
    objective=preference_objective,
    prepare_batches=add_reference_logps,
)
