"""Merges the layers of a configuration: base.yml, user files, model file, environment, overrides.
Refuses unknown keys and contradictions between layers.
"""

from maxtext.common.errors import ConfigError
from maxtext.configs import fields
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.sources import NESTED, suggest

MERGED = "logical_axis_rules"
COPIED = {"use_truncation"}  # base.yml has MaxText's value, which is no default of pre-training
EVAL_RULES = "logical_axis_rules_for_eval"


def refuse_unknown_keys(*layers: Layer) -> None:
    problems = []
    for layer in layers:
        for key, setting in layer.items():
            if key not in fields.KEYS:
                problems.append(
                    f"unknown key {key!r} ({setting.source}){suggest(key, fields.KEYS)}"
                )
    if problems:
        raise ConfigError(*problems)


def without_copied_defaults(base: Layer, file: Layer) -> Layer:
    """A file that sets most keys is a copy of base.yml, of this or another release: its values that
    equal those of base.yml are defaults, and no choices of a user, except those of COPIED. A
    resolved configuration, which has computed keys, is returned as it is."""
    is_resolved = "emb_dim" in file and not fields.is_none(file["emb_dim"].value)
    if is_resolved or len(file) <= len(base) // 2:
        return file
    return {
        key: setting
        for key, setting in file.items()
        if key in COPIED
        or key not in base
        or not fields.is_same(key, setting.value, base[key].value)
    }


def last_value(key: str, *layers: Layer) -> object:
    """The value of a key in the last layer that sets it."""
    return next(layer[key].value for layer in reversed(layers) if key in layer)


def merge_layers(
    base: Layer, files: list[Layer], model: Layer, environment: Layer, overrides: Layer
) -> Layer:
    """Merge all layers into one. `overrides` come from the command line or from Python."""
    for key in environment.keys() & overrides.keys():
        raise ConfigError(
            f"{key} is set by the environment ({environment[key].source.location}) and by the "
            f"{overrides[key].source}: "
            "unset one of them"
        )
    user = {
        key: setting for layer in [*files, environment, overrides] for key, setting in layer.items()
    }
    if fields.is_true(last_value("override_model_config", base, user)):
        order = [base, model, *files, environment, overrides]
    else:
        # After this check, a user's value of a model's key equals the model's, or is a copy of
        # the value in base.yml.
        refuse_conflicts(base, model, user)
        order = [base, *files, environment, overrides, model]
    merged: Layer = {key: setting for layer in order for key, setting in layer.items()}
    merged[MERGED] = merge_axis_rules([base, *files, model, environment, overrides])
    for key in NESTED:
        merged[key] = merge_mappings(key, [base, *files, environment, overrides])
    return merged


def merge_mappings(key: str, layers: list[Layer]) -> Setting:
    """A mapping of keys, in which later layers replace single keys. A value that is no mapping is
    returned as it is."""
    settings = [layer[key] for layer in layers if key in layer]
    if not all(isinstance(setting.value, dict) for setting in settings):
        return settings[-1]
    values = {name: value for setting in settings for name, value in setting.value.items()}
    return Setting(values, settings[-1].source)


def student_layer(base: Layer, layers: list[Layer]) -> Layer:
    """The settings of student_overrides, which replace those of the user's layers. The teacher
    keeps the values that they replace: teacher_overrides is returned with them."""
    student, teacher = (merge_mappings(key, [base, *layers]) for key in NESTED)
    if not (student.value and isinstance(student.value, dict) and isinstance(teacher.value, dict)):
        return {}
    source = Source(student.source.kind, "student_overrides")
    settings = {key: Setting(value, source) for key, value in student.value.items()}
    if teacher.value:
        common = {key: setting.value for layer in layers for key, setting in layer.items()}
        replaced = {key: common[key] for key in settings if key in common}
        settings["teacher_overrides"] = Setting(replaced | teacher.value, teacher.source)
    return settings


def refuse_conflicts(base: Layer, model: Layer, user: Layer) -> None:
    """Raise ConfigError if the user's value of a key differs from the value in the model's file.

    A user's file may be a full copy of base.yml, so a value that equals base.yml's does not count.
    """
    problems = []
    for key in (model.keys() & user.keys()) - {MERGED}:
        chosen, published = user[key], model[key]
        copied = chosen.source.kind == "file" and chosen.value == base[key].value
        if not copied and not fields.is_same(key, chosen.value, published.value):
            problems.append(
                f"{key}={chosen.value!r} ({chosen.source}) differs from {published.value!r} in the "
                f"model's file ({published.source}): drop it, or set override_model_config=true to "
                "use yours"
            )
    if problems:
        raise ConfigError(*sorted(problems))


def merge_axis_rules(layers: list[Layer]) -> Setting:
    """Merge logical_axis_rules: later rules replace earlier ones of the same name, in the same
    position; new names are appended.

    With override_logical_axis_rules, only the last layer that has rules counts.
    """
    settings = [layer[MERGED] for layer in layers if MERGED in layer]
    if replaces_axis_rules(layers):
        settings = settings[-1:]
    rules = axis_rules(settings[0])
    for setting in settings[1:]:
        rules = replace_axis_rules(rules, axis_rules(setting))
    last = settings[-1].source
    if len(settings) == 1:
        return Setting(rules, last)
    return Setting(
        rules, Source(last.kind, " + ".join(str(setting.source) for setting in settings))
    )


def replaces_axis_rules(layers: list[Layer]) -> bool:
    return fields.is_true(last_value("override_logical_axis_rules", *layers))


def replace_axis_rules(rules: list[list], later: list[list]) -> list[list]:
    names = [name for name, _ in later]
    merged: list[list] = []
    for name, axes in rules:
        if name not in names:
            merged.append([name, axes])
        elif name not in [done for done, _ in merged]:
            merged += [rule for rule in later if rule[0] == name]
    known = [name for name, _ in merged]
    return merged + [rule for rule in later if rule[0] not in known]


def complete_eval_rules(settings: Layer, layout: Layer) -> Layer:
    """logical_axis_rules_for_eval, completed by the rules of the layout for evaluation and by those
    of training; none if neither the key nor a layout is set."""
    own = Setting(settings[EVAL_RULES].value or [], settings[EVAL_RULES].source)
    added = [layout[MERGED]] if MERGED in layout else []
    added += [own] if own.value else []
    if not added:
        return {}
    rules = axis_rules(settings[MERGED])
    for setting in added:
        later = axis_rules(setting, EVAL_RULES)
        rules = later if replaces_axis_rules([settings]) else replace_axis_rules(rules, later)
    return {EVAL_RULES: Setting(rules, added[-1].source)}


def axis_rules(setting: Setting, key: str = MERGED) -> list[list]:
    """Normalise rules to [name, [axes]]; a single axis may be written without its list."""
    problem = f"{key} ({setting.source}) must be a list of pairs [name, [mesh axes]]"
    if not isinstance(setting.value, list | tuple):
        raise ConfigError(f"{problem}, not {setting.value!r}")
    rules = []
    for entry in setting.value:
        if not (isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ConfigError(f"{problem}; {entry!r} is not such a pair")
        name, axes = entry
        rules.append([name, [axes] if isinstance(axes, str) else list(axes or [])])
    return rules
