"""How a rule about the layers of a model is registered. `configs/rules` has the rules that need no
layers, and the engine of both.
"""

from collections.abc import Callable

from maxtext.configs.rules.rule import Rules
from maxtext.models.capabilities import Capabilities, decoder_blocks

Condition = Callable[[Capabilities], object]
Requirement = str | Callable[[Capabilities], str]

LAYER_RULES: Rules[Capabilities] = Rules(lambda model: model.config)
layer_rule = LAYER_RULES.rule


def inert_unless(condition: Condition, requirement: Requirement, *keys: str) -> None:
    """Refuse keys that a user sets away from their default while `condition` is false.

    `requirement` says in words what the condition asks for, or computes the words. In it, "{block}"
    stands for the decoder_block of the configuration, "{blocks}" for those in which the condition
    holds.
    """

    def requirement_text(model: Capabilities) -> str:
        text = requirement if isinstance(requirement, str) else requirement(model)
        text = text.replace("{block}", model.config.decoder_block.value)
        if "{blocks}" not in text:
            return text
        return text.replace("{blocks}", describe_blocks(decoder_blocks(model.config, condition)))

    LAYER_RULES.inert_unless(condition, requirement_text, *keys)


def inert_unless_layers_depend(
    requirement: Requirement, *keys: str, given: Condition = lambda model: True
) -> None:
    """Refuse keys that a user sets away from their default while `given` holds, if no value of the
    key changes the layers.
    """

    def depend_on(key: str) -> Condition:
        return lambda model: not given(model) or model.depends_on(key)

    for key in keys:
        inert_unless(depend_on(key), requirement, key)


def describe_blocks(blocks: list[str]) -> str:
    if len(blocks) <= 2:
        return f"decoder_block={' or '.join(blocks)}"
    return f"one of the decoder_blocks {', '.join(blocks)}"
