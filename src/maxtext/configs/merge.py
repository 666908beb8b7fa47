"""Which setting wins: base, user files, model file, environment, command line; and which
combinations are refused.
"""

from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.configs import fields
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.sources import suggest

MERGED = "logical_axis_rules"


def refuse_unknown(*layers: Layer) -> None:
    problems = []
    for layer in layers:
        for key, setting in layer.items():
            if key not in fields.KEYS:
                problems.append(
                    f"unknown key {key!r} ({setting.source}){suggest(key, fields.KEYS)}"
                )
    if problems:
        raise ConfigError(*problems)


def setting_of(key: str, *layers: Layer) -> Any:
    """The value that the last of the layers gives a key."""
    return next(layer[key].value for layer in reversed(layers) if key in layer)


def join(base: Layer, files: list[Layer], model: Layer, environment: Layer, words: Layer) -> Layer:
    """One layer out of all. `words` are the command line's or Python's."""
    for key in environment.keys() & words.keys():
        raise ConfigError(
            f"{key} is set by the environment ({environment[key].source.place}) and by the "
            f"{words[key].source}: "
            "unset one of them"
        )
    user = {
        key: setting for layer in [*files, environment, words] for key, setting in layer.items()
    }
    if fields.is_true(setting_of("override_model_config", base, user)):
        order = [base, model, *files, environment, words]
    else:
        # What a user says of a model's key is now known to be the same, or an untouched copy of
        # base.yml.
        refuse_conflicts(base, model, user)
        order = [base, *files, environment, words, model]
    merged: Layer = {key: setting for layer in order for key, setting in layer.items()}
    merged[MERGED] = join_axis_rules([base, *files, model, environment, words])
    return merged


def refuse_conflicts(base: Layer, model: Layer, user: Layer) -> None:
    """A user who names a model and gives one of its keys another value has to say that this is
    meant.

    A file may be a full copy of base.yml, so a value that it shares with base.yml does not count as
    set.
    """
    problems = []
    for key in (model.keys() & user.keys()) - {MERGED}:
        theirs, ours = user[key], model[key]
        copied = theirs.source.kind == "file" and theirs.value == base[key].value
        if not copied and not fields.same(key, theirs.value, ours.value):
            problems.append(
                f"{key}={theirs.value!r} ({theirs.source}) differs from {ours.value!r} in the "
                "model's file "
                f"({ours.source}): drop it, or set override_model_config=true to use yours"
            )
    if problems:
        raise ConfigError(*sorted(problems))


def join_axis_rules(layers: list[Layer]) -> Setting:
    """Later rules replace the earlier ones of the same name, at their place; new names come last.

    With override_logical_axis_rules only the last layer that has rules counts.
    """
    settings = [layer[MERGED] for layer in layers if MERGED in layer]
    if fields.is_true(setting_of("override_logical_axis_rules", *layers)):
        settings = settings[-1:]
    rules = axis_rules(settings[0])
    for setting in settings[1:]:
        later = axis_rules(setting)
        names = [name for name, _ in later]
        kept: list[list] = []
        for name, axes in rules:
            if name not in names:
                kept.append([name, axes])
            elif name not in [done for done, _ in kept]:
                kept += [rule for rule in later if rule[0] == name]
        known = [name for name, _ in kept]
        rules = kept + [rule for rule in later if rule[0] not in known]
    last = settings[-1].source
    if len(settings) == 1:
        return Setting(rules, last)
    return Setting(
        rules, Source(last.kind, " + ".join(str(setting.source) for setting in settings))
    )


def axis_rules(setting: Setting) -> list[list]:
    """Rules as [name, [axes]], from any of the ways to write them."""
    problem = f"logical_axis_rules ({setting.source}) must be a list of pairs [name, [mesh axes]]"
    if not isinstance(setting.value, list | tuple):
        raise ConfigError(f"{problem}, not {setting.value!r}")
    rules = []
    for entry in setting.value:
        if not (isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ConfigError(f"{problem}; {entry!r} is none")
        name, axes = entry
        rules.append([name, [axes] if isinstance(axes, str) else list(axes or [])])
    return rules
