"""From the keys of a configuration to the objective of its method."""

from maxtext.configs.types import MaxTextConfig
from maxtext.models.transformer import build_context, make_template
from maxtext.sharding import AxisRules
from maxtext.trainers.objective import LanguageModel, Objective


def make_objective(config: MaxTextConfig, rules: AxisRules) -> Objective:
    template = make_template(config, build_context(config, rules))
    return LanguageModel(config, template)
