"""Where settings come from: YAML files, the model's file, the environment, the command line, Python.

Every reader returns a Layer: key -> Setting, and a Setting knows the place that it was written in.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from maxtext.common.errors import ConfigError
from maxtext.configs import fields

HERE = Path(__file__).parent
BASE = HERE / "base.yml"
MODELS = HERE / "models"
LAYOUTS = HERE / "layouts"  # of custom_mesh_and_rule


@dataclass(frozen=True)
class Source:
    """The place a value was set in. `kind`: default, file, model, environment, command line, python, derived."""

    kind: str
    place: str = ""
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.place}:{self.line}" if self.line else self.place
        if self.kind in ("file", "model"):
            return place
        return f"{self.kind} ({place})" if place else self.kind


@dataclass(frozen=True)
class Setting:
    value: Any
    source: Source


Layer = dict[str, Setting]


class YamlLoader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.1 as PyYAML reads it, except that 1e-5 is a number, as everyone expects."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def short(path: Path) -> str:
    """A path as a person would say it: relative to the package or to the current folder where it lies below one."""
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
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{short(path)}: expected `key: value` lines at the top level")
        layer: Layer = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            setting = Setting(loader.construct_object(value_node, deep=True), Source(kind, short(path), line))
            if key in layer and layer[key].value != setting.value:
                raise ConfigError(
                    f"{key} is set twice with different values, at {layer[key].source} and line {line}: keep one"
                )
            layer[key] = setting
        return layer
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{short(path)}{where}: not valid YAML: {getattr(error, 'problem', error)}") from error
    finally:
        loader.dispose()


@cache
def base_layer() -> Layer:
    """base.yml, read once: callers do not change layers."""
    return read_yaml(BASE, "default")


def presets() -> list[str]:
    """The names of the YAML files that ship with the package."""
    return sorted(path.stem for path in HERE.glob("*.yml"))


def find_file(name: str, beside: Path | None = None) -> Path:
    """A YAML file by path (relative to the file that names it, then to here) or by the name of a shipped preset."""
    wanted = Path(name).expanduser()
    folders = [beside or Path.cwd(), HERE] if not wanted.is_absolute() else [Path("/")]
    for folder in folders:
        for candidate in (folder / wanted, folder / f"{wanted}.yml"):
            if candidate.is_file():
                return candidate.resolve()
    hint = suggest(wanted.stem, presets())
    raise ConfigError(f"no configuration file {name!r}{hint or '; shipped presets: ' + ', '.join(presets())}")


def file_chain(path: Path) -> list[tuple[Path, Layer]]:
    """The files that `path` inherits from through base_config, root first, with base.yml always at the root."""
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
            current = find_file(str(parent.value), beside=current.parent)
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


def from_words(words: Iterable[str]) -> Layer:
    """key=value words of a command line."""
    layer: Layer = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"expected key=value, got {word!r}")
        setting = Setting(fields.from_text(key, text), Source("command line"))
        if key in layer and layer[key].value != setting.value:
            raise ConfigError(
                f"{key} is set twice on the command line, to {layer[key].value!r} and {setting.value!r}: keep one"
            )
        layer[key] = setting
    return layer


def from_python(keywords: Mapping[str, Any]) -> Layer:
    return {key: Setting(value, Source("python")) for key, value in keywords.items()}


def suggest(word: str, names: Iterable[str]) -> str:
    """'; did you mean …?' with the nearest names, or nothing."""
    names = list(names)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    near += [name for name in names if len(word) > 3 and word in name and name not in near][: 3 - len(near)]
    return f"; did you mean {' or '.join(near)}?" if near else ""
