"""How a rule about the layers of a model is written and registered.

A rule reads the capabilities of a configuration and returns a message that says what to change, or
None. `configs/rules` has the rules that need no layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from maxtext.configs.problems import Problem, ProblemKind
from maxtext.configs.rules.rule import is_default
from maxtext.models.capabilities import Capabilities, decoder_blocks

Check = Callable[[Capabilities], str | None]
Condition = Callable[[Capabilities], object]
Requirement = str | Callable[[Capabilities], str]


@dataclass(frozen=True)
class LayerRule:
    key: str
    kind: ProblemKind
    check: Check

    def problem(self, model: Capabilities) -> Problem | None:
        message = self.check(model)
        return None if message is None else Problem(self.key, self.kind, message)


LAYER_RULES: list[LayerRule] = []


def layer_rule(key: str, kind: ProblemKind = ProblemKind.CONFLICT) -> Callable[[Check], Check]:
    """Register a check of the layers that complains about `key`."""

    def register(check: Check) -> Check:
        LAYER_RULES.append(LayerRule(key, kind, check))
        return check

    return register


def inert_unless(condition: Condition, requirement: Requirement, *keys: str) -> None:
    """Refuse keys that a user sets away from their default while `condition` is false.

    `requirement` says in words what the condition asks for, or computes the words. In it, "{block}"
    stands for the decoder_block of the configuration, "{blocks}" for those in which the condition
    holds.
    """

    def inert_check(key: str) -> Check:
        def check(model: Capabilities) -> str | None:
            if not set_by_user(model, key) or condition(model):
                return None
            return inert_message(model, key, condition, requirement)

        return check

    LAYER_RULES.extend(LayerRule(key, ProblemKind.INERT, inert_check(key)) for key in keys)


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


def set_by_user(model: Capabilities, key: str) -> bool:
    """Whether a user sets a key to a value other than its default."""
    return model.config.source(key).is_user and not is_default(model.config, key)


def inert_message(
    model: Capabilities, key: str, condition: Condition, requirement: Requirement
) -> str:
    value = getattr(model.config, key)
    requirement = requirement if isinstance(requirement, str) else requirement(model)
    requirement = requirement.replace("{block}", model.config.decoder_block.value)
    if "{blocks}" in requirement:
        blocks = decoder_blocks(model.config, condition)
        requirement = requirement.replace("{blocks}", describe_blocks(blocks))
    shown = getattr(value, "value", value)
    return f"{key}={shown} ({model.config.source(key)}) would do nothing: it needs {requirement}"


def describe_blocks(blocks: list[str]) -> str:
    if len(blocks) <= 2:
        return f"decoder_block={' or '.join(blocks)}"
    return f"one of the decoder_blocks {', '.join(blocks)}"
