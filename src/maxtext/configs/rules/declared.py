"""Checks that follow from the declarations of the keys: bounds, choices, and what a key needs."""

from maxtext.configs import fields
from maxtext.configs.rules.rule import in_range, inert_unless, one_of
from maxtext.configs.types import Settings, declaration
from maxtext.configs.types.key import Need


def need_of(name: str | Need) -> Need:
    """The need of a declaration; a name is that of a key that must be set."""
    if isinstance(name, Need):
        return name
    requirement = f"{name}=true" if bool in fields.members(name) else name
    return Need(lambda settings: getattr(settings, name), requirement)


for _key in Settings.model_fields:
    _declared = declaration(_key)
    if _declared.bounds:
        in_range(_declared.low, _declared.high, _key, special=_declared.special)
    if _declared.choices:
        one_of(_key, *_declared.choices)
    for _name in _declared.needs:
        _need = need_of(_name)
        inert_unless(_need.condition, _need.requirement, _key)
