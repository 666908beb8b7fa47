"""Loads a configuration: merges files, environment and overrides, validates the result and derives
the computed keys. The MaxTextConfig knows the source of every value.
"""

import os
from collections.abc import Callable, Iterable, Mapping
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
from maxtext.configs.fields import YamlLoader
from maxtext.configs.problems import Problem, ProblemKind, raise_if_any
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.types import (
    Adapters,
    DerivedValues,
    MaxTextConfig,
    Settings,
    declaration,
)
from maxtext.configs.types.derived import Architecture

ATTENTION_ALIASES = {"cudnn_flash_te": "cudnn_flash_jax"}  # Transformer Engine is not used here
UNBOUNDED_EPOCHS = 2**31 - 1
MAX_UNROLLED_LAYERS = 64  # on GPUs, where layers are unrolled by default
# The learning rate of adapters by method, if the user sets none. Those of SFT, distillation and DPO
# are those of TRL's scripts (sft.py, distillation.py, dpo.py), ten times the rates for all weights;
# "LoRA Without Regret" (Thinking Machines, 2025) measures the same factor, also in reinforcement
# learning. It is applied to the published rates of ORPO (8e-6) and of TRL's GRPOConfig (1e-6).
LORA_LEARNING_RATES = {"sft": 2e-4, "dpo": 5e-6, "orpo": 8e-5, "grpo": 1e-5, "reward": 1e-3}
# keys that only scanned layers read: a user who sets one wants layers to be scanned
SCAN_KEYS = ("param_scan_axis", "inhomogeneous_layer_cycle_interval")


def load(
    path: str | os.PathLike | None = None,
    overrides: Layer | Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    devices: derive.Devices | None = None,
    model: Layer | None = None,
    check_layers: Callable[[MaxTextConfig], list[Problem]] = lambda config: [],
) -> MaxTextConfig:
    """The configuration of a run, merged from base.yml, the YAML file at `path`, the model's file,
    M_KEY environment variables and the overrides.

    `devices` defaults to those of this machine. `model` is the description of the model in a
    checkpoint, which replaces the file of model_name. `check_layers` checks the settings against
    the layers of the model, which `models/` builds: load by `models.configuration.load`.
    """
    environ = os.environ if environ is None else environ
    layer = overrides if isinstance(overrides, dict) else sources.from_overrides(overrides)
    settings, hf_attributes = resolve(path, layer, environ, model)
    fill_defaults(settings, environ)
    checked = validate(settings)
    checked._architecture = hf_attributes
    # Ranges come first: the rules compute with these numbers. Defaults are within the limits.
    chosen = [key for key, setting in settings.items() if setting.source.kind != "default"]
    raise_if_any(limits.problems(checked, chosen) + rules.check_ranges(checked))
    problems = rules.check_settings(checked) + ledger.problems(checked, base_values())
    sized = derive.with_model_sizes(checked)
    beyond = limits.problems(sized, DerivedValues.model_fields)
    raise_if_any(problems + (beyond or check_layers(sized)))
    devices = devices or derive.visible_devices(checked.hardware)
    derived = derive.derive(checked, devices)
    scan_is_open = settings["scan_layers"].source.kind == "default" and not any(
        settings[key].source.is_user for key in SCAN_KEYS
    )
    if devices.platform == "gpu" and scan_is_open:
        # Scanning costs a fifth of the speed on GPUs; unrolled deep models compile too slowly.
        derived["scan_layers"] = derived["num_decoder_layers"] > MAX_UNROLLED_LAYERS
    complete = MaxTextConfig.model_construct(**{**dict(checked), **derived})
    complete._architecture = hf_attributes
    complete._sources.update(checked._sources, **{key: Source("derived") for key in derived})
    raise_if_any(limits.problems(complete, derived))
    raise_if_any(check_computed_keys(settings, complete) + rules.check_derived(complete))
    return complete


def peek_setting(
    key: str, path: str | os.PathLike | None, overrides: Layer, environ: Mapping[str, str]
) -> Any:
    """The value that a user gives a key, read before `load`. None if it is not set, or if `load`
    will refuse the value.
    """
    files = (
        [layer for _, layer in sources.file_chain(sources.find_file(str(path)))[1:]]
        if path is not None
        else []
    )
    layers = [*files, sources.from_environment(environ), overrides]
    layers.append(merge.student_layer(sources.base_layer(), layers))
    value = next((layer[key].value for layer in reversed(layers) if key in layer), None)
    return (
        None if value is None or fields.is_none(value) or not fields.is_valid(key, value) else value
    )


def resolve(
    path: str | os.PathLike | None,
    overrides: Layer,
    environ: Mapping[str, str],
    model: Layer | None,
) -> tuple[Layer, Architecture]:
    """The merged setting of every key, not yet validated, and the model's attributes that have no
    key.
    """
    chain = sources.file_chain(sources.find_file(str(path)) if path is not None else sources.BASE)
    base = chain[0][1]
    files = [merge.without_copied_defaults(base, layer) for _, layer in chain[1:]]
    environment = sources.from_environment(environ)
    overrides = overrides | merge.student_layer(base, [*files, environment, overrides])
    layers = [base, *files, environment, overrides]
    layout, eval_layout = (
        read_layout(merge.last_value(f"custom_mesh_and_rule{suffix}", *layers))
        for suffix in ("", "_for_eval")
    )
    files = [layout, *files] if layout else files
    if model is None:
        name = str(merge.last_value("model_name", base, *files, environment, overrides))
        model_path = sources.model_file(name)
        model = sources.read_yaml(model_path, "model") if model_path else {}
    hf_attributes = architecture.pop_hf_attributes(
        base, [model := dict(model), *files, environment, overrides]
    )
    merge.refuse_unknown_keys(*files, environment, overrides)
    merge.refuse_unknown_keys(model)
    settings = merge.merge_layers(base, files, model, environment, overrides)
    return settings | merge.complete_eval_rules(settings, eval_layout), hf_attributes


def read_layout(name: object) -> Layer:
    """A layout of custom_mesh_and_rule. Empty if there is none: validation refuses the name."""
    path = sources.LAYOUTS / f"{name or ''}.yml"
    return sources.read_yaml(path, "file") if path.is_file() else {}


def fill_defaults(settings: Layer, environ: Mapping[str, str]) -> None:
    """Fill in keys whose default depends on others: the run's name, folder and length, the model's
    tokenizer, and whether long documents are split.
    """

    def empty(key: str) -> bool:
        return fields.is_none(settings[key].value) or settings[key].value == ""

    model = str(settings["model_name"].value)
    if empty("run_name"):
        origin = "JOBSET_NAME" if environ.get("JOBSET_NAME") else "the model and the time"
        weights = settings["load_parameters_path"].value
        name = derive.run_name(model, "" if fields.is_none(weights) else str(weights), environ)
        settings["run_name"] = Setting(name, Source("derived", origin))
    is_fine_tuning = any(
        fields.validated(key, settings[key].value) is True
        for key in ("use_sft", "use_dpo", "use_grpo")
    ) or bool(fields.validated("num_labels", settings["num_labels"].value))
    has_batches = fields.validated("use_grpo", settings["use_grpo"].value) is True
    if has_batches:
        fill_rl_defaults(settings)
    if not is_fine_tuning and settings["use_truncation"].source.kind == "default":
        # Truncation would drop most of a corpus of long documents. Fine-tuning keeps rows whole.
        settings["use_truncation"] = Setting(False, Source("derived", "pre-training text"))
    if settings["steps"].value == -1:  # the schedule's length; the range check refuses -1 for both
        length = settings["learning_rate_schedule_steps"].value
        by_epochs = is_fine_tuning and length == -1
        settings["steps"] = (
            sources.base_layer()["steps"] if by_epochs else Setting(length, Source("derived"))
        )
    is_reward_model = fields.validated("num_labels", settings["num_labels"].value)
    if is_reward_model and settings["packing"].source.kind == "default":
        settings["packing"] = Setting(False, Source("derived", "num_labels"))
    steps, epochs = settings["steps"], settings["num_epoch"]
    is_bounded = steps.source.is_user or has_batches
    if is_fine_tuning and is_bounded and epochs.source.kind == "default":
        # Data for fine-tuning is small: it is repeated as often as the steps need. An epoch may be
        # less than a batch, or packed even less than a row. One step reads the data once.
        epochs_needed = 1 if steps.value == 1 else UNBOUNDED_EPOCHS
        named = "num_batches" if has_batches else "steps"
        settings["num_epoch"] = Setting(epochs_needed, Source("derived", named))
    if fields.validated("enable_lora", settings["enable_lora"].value) is False:
        for key in Adapters.model_fields.keys() - {"enable_lora", "max_adapters"}:
            settings[key] = sources.base_layer()[key]
    fill_lora_learning_rate(settings, is_fine_tuning)
    attention = settings["attention"]
    if isinstance(attention.value, str) and attention.value in ATTENTION_ALIASES:
        name = ATTENTION_ALIASES[attention.value]
        LOGGER.warning(
            "attention=%s is %s here: the same cuDNN kernels, called by JAX", attention.value, name
        )
        settings["attention"] = Setting(
            name, Source(attention.source.kind, f"alias {attention.value}")
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


def fill_lora_learning_rate(settings: Layer, is_fine_tuning: bool) -> None:
    """The learning rate of adapters in place of that for all weights, which a preset or base.yml
    has; for fine-tuning and distillation."""
    rate = settings["learning_rate"]
    if rate.source.is_user and not sources.is_preset(rate.source):
        return
    is_distilling = settings["teacher_overrides"].value or settings["offline_data_dir"].value
    has_adapters = any(
        fields.validated(key, settings[key].value) for key in ("lora_rank", "lora_restore_path")
    )
    if not (has_adapters and (is_fine_tuning or is_distilling)):
        return
    method = "sft"
    if fields.validated("use_grpo", settings["use_grpo"].value) is True:
        method = "grpo"
    elif fields.validated("use_dpo", settings["use_dpo"].value) is True:
        method = "orpo" if settings["dpo_loss_type"].value == "orpo" else "dpo"
    elif fields.validated("num_labels", settings["num_labels"].value):
        method = "reward"
    settings["learning_rate"] = Setting(
        LORA_LEARNING_RATES[method], Source("derived", "LoRA of " + method)
    )


def fill_rl_defaults(settings: Layer) -> None:
    """The steps of num_batches batches of prompts, microbatches of train_micro_batch_size prompts,
    rows that are not packed, and samples that top_k and nucleus_p truncate if they are set. Values
    that are no numbers are left to the range checks.
    """

    def number(key: str) -> Any:
        return fields.normalise(key, settings[key].value)

    derived = Source("derived", "use_grpo")
    if settings["per_device_batch_size"].source.is_user:
        LOGGER.warning(
            "per_device_batch_size is not used: a step of use_grpo has batch_size prompts"
        )
    if settings["packing"].source.kind == "default":
        settings["packing"] = Setting(False, derived)
    try:
        if settings["decode_sampling_strategy"].source.kind == "default":
            has_top_k = number("decode_sampling_top_k") > 0
            has_top_p = 0 < number("decode_sampling_nucleus_p") < 1
            names = {(True, True): "composite", (True, False): "topk", (False, True): "nucleus"}
            strategy = names.get((has_top_k, has_top_p), "weighted")
            settings["decode_sampling_strategy"] = Setting(strategy, derived)
        lengths = [number(key) for key in ("steps", "learning_rate_schedule_steps")]
        if settings["steps"].source.kind == "default" or lengths == [-1, -1]:
            batches = number("num_batches") * number("train_fraction") * number("num_epoch")
            # 0.29 · 100 is 28.999999999999996 in binary.
            steps = max(int(round(batches, 6)), 1) * number("num_iterations")
            settings["steps"] = Setting(steps, Source("derived", "num_batches"))
        micro_batch, prompts = number("train_micro_batch_size"), number("batch_size")
        accumulates = settings["gradient_accumulation_steps"].source.is_user
        if micro_batch > 0 and prompts % micro_batch == 0 and not accumulates:
            settings["gradient_accumulation_steps"] = Setting(
                prompts // micro_batch, Source("derived", "train_micro_batch_size")
            )
    except (TypeError, ValueError, OverflowError):  # reported with the key that has the value
        return


@cache
def published_tokenizers() -> dict[str, str]:
    return yaml.load((sources.HERE / "tables" / "tokenizers.yml").read_text(), YamlLoader)


@cache
def base_values() -> Settings:
    """The values of base.yml."""
    return validate(sources.base_layer())


def validate(settings: Layer) -> Settings:
    """Typed values. Raises one ConfigError that lists every value of the wrong type."""
    computed = DerivedValues.model_fields
    values = {
        key: fields.normalise(key, setting.value)
        for key, setting in settings.items()
        if key not in computed
    }
    problems = []
    for key, value in values.items():
        if not fields.fits(key, value):
            problems.append(type_problem(key, value, settings[key]))
    try:
        checked = Settings.model_validate(values)
    except ValidationError as error:
        wrong = {str(detail["loc"][0]) for detail in error.errors()}
        problems += [
            type_problem(key, values[key], settings[key]) for key in values if key in wrong
        ]
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
            f"and comes to {getattr(complete, key)!r}: {declaration(key).meaning}",
        )
        for key in DerivedValues.model_fields
        if not fields.is_none(settings[key].value)
        and settings[key].source.kind != "default"
        and not fields.is_same(key, settings[key].value, getattr(complete, key))
    ]


def type_problem(key: str, value: object, setting: Setting) -> str:
    hint = sources.suggest(value, fields.choices(key)) if isinstance(value, str) else ""
    expected = f"expected {fields.describe(key)}{hint}"
    if value is None or value == "":
        return f"{key} has no value ({setting.source}): {expected}"
    return f"{key}={limits.abbreviated(value)} ({setting.source}): {expected}"
