"""Reads settings from YAML files, the environment, the command line and Python.

Every reader returns a Layer: key -> Setting, and a Setting knows where it was written.

`flatten` converts the spellings of MaxText's post-training files and command lines. A mapping
`lora:`, `dpo:` or `rl:` groups keys that are flat here, and `lora.lora_rank=8` sets one of them on
a command line. Some keys had or have other names.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import yaml

from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.log import LOGGER
from maxtext.configs import fields
from maxtext.configs.fields import YamlLoader, check_nesting
from maxtext.configs.provenance import Layer, Setting, Source

SECTIONS = ("lora", "dpo", "rl")
RENAMED = {
    "hf_lora_adapter_path": ("lora_restore_path",),
    "rollout_async_scheduling": ("async_scheduling",),
    "micro_batch_size": ("train_micro_batch_size", "rollout_micro_batch_size"),
    "algo": ("dpo_loss_type",),
    "hf_subset": ("hf_name",),
}
RENAMED_VALUES = {("algo", "dpo"): "sigmoid"}
# A value that stands for the default, and that the type of the key does not have.
EMPTY = {
    "lora_tile_size": None,
    "constant_bound_config": "",
    "multi_tier_checkpointing_backup_interval_minutes": None,
}
# Keys without a meaning here, with the value that asks for nothing.
WITHOUT_MEANING = {
    "rollout_subslice_shape": "",
    "rollout_enable_single_controller": False,
    "debug": False,
    "hf_subset": "",
}
VLLM_FILE = "vllm_config_path"


def flatten(layer: Layer) -> Layer:
    """The settings by the keys of base.yml. Raises ConfigError if two spellings of a key have
    different values."""
    flat: Layer = {}

    def add(key: str, value: object, setting: Setting) -> None:
        if key in EMPTY and value == EMPTY[key]:
            return
        if key in flat and flat[key].value != value:
            raise ConfigError(
                f"{key} is set twice with different values, {flat[key].value!r} and {value!r} "
                f"({setting.source}): keep one"
            )
        flat[key] = Setting(value, setting.source)

    for key, setting in layer.items():
        for name, value in expand(key, setting.value):
            if name == VLLM_FILE:
                LOGGER.info("%s is not read: rollouts use the engine of this package", VLLM_FILE)
            elif name not in WITHOUT_MEANING or value != WITHOUT_MEANING[name]:
                for new_name in RENAMED.get(name, (name,)):
                    add(new_name, RENAMED_VALUES.get((name, str(value)), value), setting)
    return flat


def expand(key: str, value: object) -> list[tuple[str, object]]:
    """The settings that a key stands for."""
    if key in SECTIONS and isinstance(value, dict):
        return [(str(name), inner) for name, inner in value.items()]
    if key == "debug" and isinstance(value, dict) and set(value) == {"rl"}:
        return [("rl", value["rl"])]
    return [(key, value)]


def flat_name(key: str) -> str:
    """The flat key of `lora.lora_rank`; other keys are returned as they are."""
    section, dot, inner = key.partition(".")
    if dot and section == "debug":
        return inner if inner == "rl" else key
    return inner if dot and section in SECTIONS else key


HERE = Path(__file__).parent
BASE = HERE / "base.yml"
MODELS = HERE / "models"
LAYOUTS = HERE / "layouts"  # of custom_mesh_and_rule
# Mappings of configuration keys. `key.inner=value` sets one of them on the command line.
NESTED = ("student_overrides", "teacher_overrides")
LONGEST_WORD = 100  # characters of a misspelt name that are compared with known names

# The keys that choose the method of a command, if a FILE replaces its preset.
METHOD_KEYS = {
    "sft": ["use_sft=true"],
    "dpo": ["use_dpo=true"],
    "orpo": ["use_dpo=true", "dpo_loss_type=orpo"],
    "distill": [],
    "grpo": ["use_grpo=true"],
    "reward": ["num_labels=1"],
}


def short(path: Path) -> str:
    """A path for messages: relative to this folder or the current one if it is below either."""
    for folder in (HERE, Path.cwd()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(path)


def read_yaml(path: Path, kind: str) -> Layer:
    """The top-level keys of a YAML file with their line numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    loader = YamlLoader(text)
    try:
        if not path.is_relative_to(HERE):
            check_nesting(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{short(path)}: expected `key: value` lines at the top level")
        layer: Layer = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            setting = Setting(
                loader.construct_object(value_node, deep=True), Source(kind, short(path), line)
            )
            if key in layer and layer[key].value != setting.value:
                raise ConfigError(
                    f"{key} is set twice with different values, at {layer[key].source} and line "
                    f"{line}: keep one"
                )
            layer[key] = setting
        return flatten(layer) if kind == "file" else layer
    except (yaml.YAMLError, ValueError) as error:  # ValueError: e.g. a date without such a day
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{short(path)}{where}: not valid YAML: {getattr(error, 'problem', error)}"
        ) from error
    finally:
        loader.dispose()


@cache
def base_layer() -> Layer:
    """base.yml, read once. Callers must not change the layer."""
    return read_yaml(BASE, "default")


def presets() -> list[str]:
    """The names of the YAML files that ship with the package."""
    return sorted(path.stem for path in HERE.glob("*.yml"))


def is_preset(source: Source) -> bool:
    """Whether a value comes from a YAML file that ships with the package."""
    location = source.location
    return source.kind == "file" and (HERE / location).is_file() and not Path(location).is_file()


def find_file(name: str, parent: Path | None = None) -> Path:
    """Find a YAML file by path or by the name of a shipped preset.

    A relative path is looked up in `parent` (the current folder by default), then in this folder,
    and last by what follows `configs/` or `../` in it: the paths of presets in a checkout.
    """
    path = local_path(name)
    folders = [parent or Path.cwd(), HERE] if not path.is_absolute() else [Path("/")]
    candidates = [folder / path for folder in folders]
    if not path.is_absolute():
        candidates.append(HERE / path_in_configs(path))
    for candidate in candidates:
        for file in (candidate, candidate.with_name(f"{candidate.name}.yml")):
            if file.is_file():
                return file.resolve()
    hint = suggest(path.stem, presets())
    raise ConfigError(
        f"no configuration file {name!r}{hint or '; shipped presets: ' + ', '.join(presets())}"
    )


def path_in_configs(path: Path) -> Path:
    """The part of a path after `configs/`, or after `..`: of src/maxtext/configs/post_train/sft.yml
    it is post_train/sft.yml."""
    parts = list(path.parts)
    for index in reversed(range(len(parts))):
        if parts[index] in ("configs", ".."):
            return Path(*parts[index + 1 :])
    return path


def file_chain(path: Path) -> list[tuple[Path, Layer]]:
    """The files that `path` inherits from through base_config, root first. The root is always
    base.yml.
    """
    chain: list[tuple[Path, Layer]] = []
    current: Path | None = path.resolve()
    while current is not None:
        if any(current == seen for seen, _ in chain):
            names = " -> ".join(short(seen) for seen, _ in [*chain, (current, None)])
            raise ConfigError(f"base_config forms a circle: {names}")
        layer = base_layer() if current == BASE else read_yaml(current, "file")
        chain.append((current, layer))
        parent = layer.get("base_config") if current != BASE else None
        if parent is not None and fields.is_none(parent.value):
            parent = None
        if parent is not None:
            current = find_file(str(parent.value), parent=current.parent)
        else:
            current = BASE if current != BASE else None
    return chain[::-1]


def model_file(model_name: str) -> Path | None:
    """The file of a named model; `default` has none, and -Instruct shares the base model's."""
    if model_name == "default":
        return None
    path = MODELS / f"{model_name.removesuffix('-Instruct')}.yml"
    if path.is_file():
        return path
    names = fields.choices("model_name")
    raise ConfigError(f"unknown model_name {model_name!r}{suggest(model_name, names)}")


def from_environment(environ: Mapping[str, str]) -> Layer:
    """M_KEY=value variables."""
    layer: Layer = {}
    for name, text in sorted(environ.items()):
        if name.startswith("M_"):
            key = name[2:].lower()
            layer[key] = Setting(fields.from_text(key, text), Source("environment", name))
    return layer


def from_overrides(overrides: Iterable[str]) -> Layer:
    """key=value arguments of a command line."""
    layer: Layer = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"expected key=value, got {override!r}")
        key = flat_name(key)
        nested, dot, inner = key.partition(".")
        if dot and nested in NESTED:
            layer[nested] = with_nested_value(layer.get(nested), nested, inner, text)
            continue
        setting = Setting(fields.from_text(key, text), Source("command line"))
        if key in layer and layer[key].value != setting.value:
            raise ConfigError(
                f"{key} is set twice on the command line, to {layer[key].value!r} and "
                f"{setting.value!r}: keep one"
            )
        layer[key] = setting
    return flatten(layer)


def with_nested_value(setting: Setting | None, key: str, inner: str, text: str) -> Setting:
    """A mapping of configuration keys, with the value of `key.inner=text` added."""
    values = {} if setting is None or not isinstance(setting.value, dict) else setting.value
    value = fields.from_text(inner, text)
    if inner in values and values[inner] != value:
        raise ConfigError(
            f"{key}.{inner} is set twice on the command line, to {values[inner]!r} and {value!r}: "
            "keep one"
        )
    return Setting({**values, inner: value}, Source("command line"))


def from_python(keywords: Mapping[str, object]) -> Layer:
    return flatten({key: Setting(value, Source("python")) for key, value in keywords.items()})


GENERIC_WORDS = frozenset(
    ("enable", "use", "num", "max", "base", "is", "of", "the", "per", "n", "size", "path", "type")
)


def suggest(word: str, names: Iterable[str]) -> str:
    """'; did you mean …?' with the nearest names, or nothing.

    A name that is spelt almost alike is taken for a typing error. Otherwise names qualify that
    share the informative words of `word` or are similar to it.
    """
    word = word[:LONGEST_WORD]
    ratios = {name: difflib.SequenceMatcher(None, word, name).ratio() for name in names}
    typing_errors = [name for name, ratio in ratios.items() if ratio >= 0.9]
    if typing_errors and len(words_in(word)) == max(len(words_in(name)) for name in typing_errors):
        near = sorted(typing_errors, key=lambda name: -ratios[name])[:1]
    else:
        informative = words_in(word) - GENERIC_WORDS
        shared = [name for name in ratios if informative and informative <= words_in(name)]
        alike = [name for name, ratio in ratios.items() if ratio >= 0.75]
        inside = [name for name in ratios if len(word) > 3 and word in name]
        extra = {name: len(words_in(name) - words_in(word) - GENERIC_WORDS) for name in ratios}
        shared = sorted(shared, key=lambda name: (extra[name], -ratios[name], name))
        others = sorted({*alike, *inside}, key=lambda name: (-ratios[name], name))
        near = list(dict.fromkeys([*shared, *others]))[:3]
        if not near:
            near = difflib.get_close_matches(word, ratios, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def words_in(name: str) -> set[str]:
    return set(re.split(r"[^A-Za-z0-9]+", name)) - {""}
