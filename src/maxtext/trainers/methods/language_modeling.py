"""Next-token prediction as methods: pre-training on documents, and supervised fine-tuning on rows
whose masks leave out prompts.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.row_formats import DOCUMENTS, MASKED_ROWS, RowFormat
from maxtext.layers.parameters import Template
from maxtext.sharding import AxisRules
from maxtext.trainers.methods.method import Method
from maxtext.trainers.objective import LanguageModelObjective


def sequence_format(config: MaxTextConfig) -> RowFormat:
    """The rows of methods that train on documents, or with use_sft on masked rows."""
    return MASKED_ROWS if config.use_sft else DOCUMENTS


def language_model_objective(
    config: MaxTextConfig, template: Template, rules: AxisRules
) -> LanguageModelObjective:
    return LanguageModelObjective(config, template, has_prompts=config.use_sft)


PRETRAINING = Method(
    "pre-training",
    is_chosen=lambda config: True,  # the last of METHODS
    row_format=sequence_format,
    objective=language_model_objective,
    trains_mtp=True,
)
SFT = Method(
    "SFT",
    is_chosen=lambda config: config.use_sft,
    row_format=sequence_format,
    objective=language_model_objective,
    trains_mtp=True,
)
