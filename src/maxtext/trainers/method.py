"""From the keys of a configuration to the objective of its method."""

from maxtext.configs.types import MaxTextConfig
from maxtext.models.transformer import build_context, make_template
from maxtext.sharding import AxisRules
from maxtext.trainers.objective import LanguageModel, Objective
from maxtext.trainers.preference import Preference


def make_objective(config: MaxTextConfig, rules: AxisRules) -> Objective:
    context = build_context(config, rules)
    template = make_template(config, context)
    if config.use_dpo:
        return Preference(config, template, base_template=make_template(config, context))
    return LanguageModel(config, template)
