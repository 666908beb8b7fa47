"""Checks of a configuration against the layers of its model: keys that would do nothing, and keys
that the layers cannot combine.
"""

from maxtext.common.errors import ConfigError
from maxtext.configs.problems import Problem, ProblemKind
from maxtext.configs.rules.parallelism import reorders_tokens
from maxtext.configs.types import MaxTextConfig
from maxtext.models import rules_attention, rules_layers
from maxtext.models.capabilities import Capabilities
from maxtext.models.rule import LAYER_RULES

__all__ = [
    "check_layers",
    "check_order",
    "layer_needs",
    "rules_attention",
    "rules_layers",
]


def check_order(config: MaxTextConfig) -> list[Problem]:
    """Layers that do not support the order of tokens. Needs the derived values of the mesh."""
    if not reorders_tokens(config) or "linear" not in Capabilities(config).layer_kinds:
        return []
    message = (
        "context_parallel_load_balance=true reorders tokens, which a gated DeltaNet layer does not "
        "support: set context_parallel_load_balance=false"
    )
    return [Problem("context_parallel_load_balance", ProblemKind.CONFLICT, message)]


def layer_needs(config: MaxTextConfig, key: str) -> list[str]:
    """The requirements of a key on the layers, in words."""
    return LAYER_RULES.needs(key, Capabilities(config))


def check_layers(config: MaxTextConfig) -> list[Problem]:
    """Settings that do not fit the layers of the model, or layers that cannot be built.

    Of the derived values only the model sizes are needed.
    """
    try:
        model = Capabilities(config)
    except ConfigError as error:
        return [
            Problem("decoder_block", ProblemKind.CONFLICT, message) for message in error.problems
        ]
    except ValueError:
        return []  # a spec refuses sizes that a rule of the settings reports
    return LAYER_RULES.problems(model)
