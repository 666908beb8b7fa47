"""From files, environment and words to one frozen, checked MaxTextConfig that knows where each
value came from.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import yaml
from pydantic import ValidationError

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs import (
    architecture,
    derive,
    fields,
    ledger,
    limits,
    merge,
    rules,
    sources,
)
from maxtext.configs.problems import Problem, ProblemKind, raise_if_any
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.types import DerivedValues, MaxTextConfig, Settings
from maxtext.configs.types.architecture import Architecture
from maxtext.configs.yaml_loader import YamlLoader

ATTENTION_ALIASES = {"cudnn_flash_te": "cudnn_flash_jax"}  # Transformer Engine is not used here
MOST_UNROLLED = 64  # layers, where unrolling is the default
OF_SCANS = (
    "param_scan_axis",
    "inhomogeneous_layer_cycle_interval",
)  # a person who sets one means scanned layers


def config(path: str | os.PathLike | None = None, **overrides: Any) -> MaxTextConfig:
    """The configuration of a run: defaults, the YAML file, the model's file, M_KEY variables, then
    the keywords.
    """
    return load(path, sources.from_python(overrides))


def load(
    path: str | os.PathLike | None = None,
    words: Layer | Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    devices: derive.Devices | None = None,
    model: Layer | None = None,
) -> MaxTextConfig:
    """As `config`, from command-line words; devices are this machine's unless given. `model`: what
    a checkpoint says of itself, in place of the file of model_name."""
    environ = os.environ if environ is None else environ
    words = words if isinstance(words, dict) else sources.from_words(words)
    settings, facts = resolve(path, words, environ, model)
    fill_empty(settings, environ)
    checked = validate(settings)
    checked._architecture = facts
    # The rules compute with these numbers, so they come after the ranges.
    raise_if_any(limits.problems(checked) + rules.check_ranges(checked))
    raise_if_any(rules.check_settings(checked) + ledger.problems(checked, base_values()))
    devices = devices or derive.visible_devices()
    derived = derive.derive(checked, devices)
    free = settings["scan_layers"].source.kind == "default" and not any(
        settings[key].source.is_user for key in OF_SCANS
    )
    if devices.platform == "gpu" and free:
        # Scanned layers are a fifth slower there; very deep models would take too long to compile.
        derived["scan_layers"] = derived["num_decoder_layers"] > MOST_UNROLLED
    complete = MaxTextConfig.model_construct(**{**dict(checked), **derived})
    complete._architecture = facts
    complete._sources.update(checked._sources, **{key: Source("derived") for key in derived})
    raise_if_any(limits.problems(complete))
    raise_if_any(check_computed_keys(settings, complete) + rules.check_derived(complete))
    return complete


def wanted(
    key: str, path: str | os.PathLike | None, words: Layer, environ: Mapping[str, str]
) -> Any:
    """What files, environment and words say of a key before `load`; None where they say nothing, or
    what `load` will refuse."""
    files = (
        [layer for _, layer in sources.file_chain(sources.find_file(str(path)))[1:]]
        if path is not None
        else []
    )
    layers = [*files, sources.from_environment(environ), words]
    value = next((layer[key].value for layer in reversed(layers) if key in layer), None)
    return (
        None if value is None or fields.is_none(value) or not fields.is_valid(key, value) else value
    )


def resolve(
    path: str | os.PathLike | None, words: Layer, environ: Mapping[str, str], model: Layer | None
) -> tuple[Layer, Architecture]:
    """The winning setting of every key, not yet checked against its type, and the facts beyond
    keys.
    """
    chain = sources.file_chain(sources.find_file(str(path)) if path is not None else sources.BASE)
    base, files = chain[0][1], [layer for _, layer in chain[1:]]
    environment = sources.from_environment(environ)
    layout = str(merge.setting_of("custom_mesh_and_rule", base, *files, environment, words) or "")
    if (
        path := sources.LAYOUTS / f"{layout}.yml"
    ).is_file():  # another name is refused with the other misfits
        files = [sources.read_yaml(path, "file"), *files]
    if model is None:
        name = str(merge.setting_of("model_name", base, *files, environment, words))
        model_path = sources.model_file(name)
        model = sources.read_yaml(model_path, "model") if model_path else {}
    facts = architecture.take(base, [model := dict(model), *files, environment, words])
    merge.refuse_unknown(*files, environment, words)
    merge.refuse_unknown(model)
    return merge.join(base, files, model, environment, words), facts


def fill_empty(settings: Layer, environ: Mapping[str, str]) -> None:
    """Keys that mean something when left open: the run's name, folder and length, the model's
    tokenizer.
    """

    def empty(key: str) -> bool:
        return fields.is_none(settings[key].value) or settings[key].value == ""

    model = str(settings["model_name"].value)
    if empty("run_name"):
        place = "JOBSET_NAME" if environ.get("JOBSET_NAME") else "the model and the time"
        weights = settings["load_parameters_path"].value
        name = derive.run_name(model, "" if fields.is_none(weights) else str(weights), environ)
        settings["run_name"] = Setting(name, Source("derived", place))
    if settings["steps"].value == -1:  # as long as the schedule; the range check refuses two of -1
        settings["steps"] = Setting(
            settings["learning_rate_schedule_steps"].value, Source("derived")
        )
    attention = settings["attention"]
    if isinstance(attention.value, str) and attention.value in ATTENTION_ALIASES:
        known = ATTENTION_ALIASES[attention.value]
        LOGGER.warning(
            "attention=%s is %s here: the same cuDNN kernels, called by JAX", attention.value, known
        )
        settings["attention"] = Setting(
            known, Source(attention.source.kind, f"alias {attention.value}")
        )
    if empty("base_output_directory"):
        settings["base_output_directory"] = Setting(
            derive.base_output_directory(), Source("derived")
        )
    if empty("tokenizer_path") and model in published_tokenizers():
        published = Source("derived", "published with the model")
        settings["tokenizer_path"] = Setting(published_tokenizers()[model], published)
        if settings["tokenizer_type"].source.kind == "default":
            settings["tokenizer_type"] = Setting("huggingface", published)


@cache
def published_tokenizers() -> dict[str, str]:
    return yaml.load((sources.HERE / "tables" / "tokenizers.yml").read_text(), YamlLoader)


@cache
def base_values() -> Settings:
    """What base.yml alone says."""
    return validate(sources.base_layer())


def validate(settings: Layer) -> Settings:
    """Typed values, or every misfit in one error."""
    values = {
        key: fields.normalise(key, setting.value)
        for key, setting in settings.items()
        if key not in DerivedValues.model_fields
    }
    problems = []
    for key, value in values.items():
        if not fields.fits(key, value):
            problems.append(misfit(key, value, settings[key]))
    try:
        checked = Settings.model_validate(values)
    except ValidationError as error:
        wrong = {str(detail["loc"][0]) for detail in error.errors()}
        problems += [misfit(key, values[key], settings[key]) for key in values if key in wrong]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    checked._sources.update({key: setting.source for key, setting in settings.items()})
    return checked


def check_computed_keys(settings: Layer, complete: MaxTextConfig) -> list[Problem]:
    """A file may contain computed keys, as `maxtext config` writes it, but only with the value
    that they are computed to.
    """
    return [
        Problem(
            key,
            ProblemKind.CONFLICT,
            f"{key}={settings[key].value!r} ({settings[key].source}) cannot be set, it is computed "
            f"and comes to {getattr(complete, key)!r}: {ledger.meaning(key)}",
        )
        for key in DerivedValues.model_fields
        if not fields.is_none(settings[key].value)
        and settings[key].source.kind != "default"
        and not fields.same(key, settings[key].value, getattr(complete, key))
    ]


def misfit(key: str, value: Any, setting: Setting) -> str:
    hint = sources.suggest(value, fields.choices(key)) if isinstance(value, str) else ""
    expected = f"expected {fields.describe(key)}{hint}"
    if value is None or value == "":
        return f"{key} has no value ({setting.source}): {expected}"
    return f"{key}={limits.abbreviated(value)} ({setting.source}): {expected}"
