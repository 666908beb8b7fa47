"""The positional arguments of a command line, which are not key=value: [FILE] [MODEL] [DATA ...].

- FILE: as the first argument a shipped preset or any YAML file; elsewhere a name that ends in .yml.
- MODEL: a folder with a model, org/name of the Hugging Face Hub, or the name of a model.
- DATA: files, folders or globs, whose format follows from their names; or org/name of a dataset.

A model and data become the keys that name them, so that the rest of the program reads keys alone.
"""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.hub import is_hub_name

MODEL_KEY = "load_parameters_path"
TEACHER_KEY = f"teacher_overrides.{MODEL_KEY}"
FILES_KEYS = {"train": "grain_train_files", "eval": "grain_eval_files"}
YAML_ENDINGS = (".yml", ".yaml")
WEIGHT_ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
# Files in folders of data that hold no data: those of `datasets` and of Hub repositories
NO_DATA = re.compile(
    r"(dataset_infos?|dataset_dict|state)\.json|(readme|license|changelog)(\.\w+)?", re.IGNORECASE
)
SPLIT = re.compile(
    r"((train)(ing)?|test|validation|valid|dev|eval(uation)?)(?![a-z])", re.IGNORECASE
)


def split(
    args: list[str],
    data: str | None = "train",
    models: Sequence[str] = (MODEL_KEY,),
    presets: bool = True,
) -> tuple[str | None, list[str]]:
    """Split the arguments into (FILE or None, key=value overrides). The overrides begin with those
    that stand for the models and the data.

    `data` is "train" or "eval", or None for a command that reads no data. `models` are the keys of
    the models, in order. Raises ConfigError for other positional arguments.
    """
    positional_args, overrides = split_overrides(args)
    set_keys = {override.partition("=")[0]: override for override in overrides}
    is_file = presets and positional_args and names_file(positional_args[0], set_keys)
    file = positional_args.pop(0) if is_file else None
    free = [key for key in models if key not in set_keys]
    named: list[str] = []
    data_args: list[str] = []
    for arg in positional_args:
        if arg.endswith(YAML_ENDINGS):
            if file is not None:
                raise ConfigError(
                    f"{file} and {arg} are two configuration files: keep one, whose base_config "
                    "may name the other"
                )
            file = arg
        elif override := model_override(arg, free, bool(models)):
            named.append(override)
            free.pop(0)
        elif data is None and free:  # no other argument is left: who opens the model checks it
            named.append(f"{free.pop(0)}={arg}")
        else:
            data_args.append(arg)
    if data_args and data is None:
        raise ConfigError(f"unknown argument {data_args[0]!r}{key_hint(data_args[0])}")
    return file, [*named, *data_overrides(data_args, data, set_keys), *overrides]


def split_overrides(args: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into (positional arguments, key=value overrides)."""
    positional_args = [arg for arg in args if is_positional(arg)]
    return positional_args, [arg for arg in args if not is_positional(arg)]


def is_positional(arg: str) -> bool:
    key, equals, _ = arg.partition("=")
    return not equals or "/" in key or os.path.exists(arg)  # a path may have a = in it


def names_file(arg: str, set_keys: dict[str, str]) -> bool:
    """Whether the first argument is a configuration file or a preset."""
    from maxtext.configs import sources

    path = local_path(arg)
    is_path = "/" in arg or arg.startswith((".", "~"))
    if path.is_dir() and is_path and not path.with_name(f"{path.name}.yml").is_file():
        return False  # a folder that is written as a path may have the name of a preset
    if path.is_file() and (format_of(arg) or "grain_file_type" in set_keys):
        return False
    if arg.endswith((*YAML_ENDINGS, *WEIGHT_ENDINGS)):
        return arg.endswith(YAML_ENDINGS)
    try:
        sources.find_file(arg)
    except ConfigError:
        return False
    return True


def model_override(arg: str, free: Sequence[str], takes_models: bool) -> str | None:
    """The key=value that names a model, or None if the argument is none. `free`: the keys of models
    that are not set yet.
    """
    from maxtext.configs import fields

    path = local_path(arg)
    is_missing = not path.exists() and not glob.has_magic(arg)
    is_name = is_missing and arg in fields.choices("model_name")
    is_model = path.is_dir() and is_model_folder(path)
    if arg.endswith(WEIGHT_ENDINGS) and path.is_file():
        raise ConfigError(f"{arg} is a file of weights: name the folder that it is in")
    if (is_name or is_model) and not free:
        reason = "another one is named" if takes_models else "this command takes none"
        raise ConfigError(f"{arg} is a model, and {reason}: leave one out")
    if is_model or (is_missing and free and is_hub_name(arg) and not format_of(arg)):
        return f"{free[0]}={arg}"
    return f"{free[0].replace(MODEL_KEY, 'model_name')}={arg}" if is_name else None


def is_model_folder(path: Path) -> bool:
    """Whether a folder has a model, a run's checkpoints, or their settings. Raises ConfigError for
    an adapter, which is no model.
    """
    from maxtext.checkpoint import steps

    if any((path / name).is_file() for name in ("config.json", "config.yml")):
        return True
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{path} is a PEFT adapter: name its base model, and the adapter with --adapter {path}"
        )
    return steps.has_steps(path) or any(path.glob("*.safetensors"))


def data_overrides(args: list[str], data: str | None, set_keys: dict[str, str]) -> list[str]:
    """The key=value overrides that name data. Raises ConfigError if its files are missing, or are
    of several formats or of an unknown one.
    """
    if not args:
        return []
    assert data is not None, "only commands with data get here"
    key = FILES_KEYS[data]
    for other in (key, f"hf_{data}_files", "hf_path", "dataset_type"):
        if other in set_keys and set_keys[other] != "dataset_type=grain":
            raise ConfigError(
                f"{args[0]} names the data, and so does {set_keys[other]}: leave one out"
            )
    if not has_files(args[0]) and is_hub_name(args[0]) and not format_of(args[0]):
        if len(args) > 1:
            raise ConfigError(
                f"there is no file or folder {args[0]}, and a dataset of the Hub comes alone"
            )
        return ["dataset_type=hf", f"hf_path={args[0]}"]
    file_type = set_keys.get("grain_file_type", "").partition("=")[2]
    files: list[str] = []
    formats: dict[str, str] = {}  # with an example of each
    for arg in args:
        if re.search("[,;]", arg):
            raise ConfigError(
                f"{arg}: separate files by spaces; a mixture is written {key}=FILES,WEIGHT;…"
            )
        if not has_files(arg):
            raise unknown_argument(arg)
        patterns, examples = data_files(arg, bool(file_type))
        files += patterns
        formats |= {kind: examples[kind] for kind in examples.keys() - formats.keys()}
    if len(formats) > 1 and not file_type:
        raise ConfigError(
            "data has one format, and these are several: "
            + ", ".join(f"{kind} ({formats[kind]})" for kind in sorted(formats))
        )
    file_type = file_type or next(iter(formats))
    settings = {"dataset_type": "grain", "grain_file_type": file_type, key: ",".join(files)}
    if data == "train":
        settings["grain_train_mixture_config_path"] = ""  # which FILE may set
    return [f"{name}={value}" for name, value in settings.items() if name not in set_keys]


def has_files(arg: str) -> bool:
    return local_path(arg).exists() or glob.has_magic(arg) or "{stdlib}" in arg


def data_files(arg: str, is_known: bool) -> tuple[list[str], dict[str, str]]:
    """(files, folders and globs to read, an example of each format) for an argument. `is_known`: a
    key says the format.
    """
    from maxtext.input_pipeline.formats.files import find_files

    paths = find_files("the data", arg)
    if is_known:
        return [arg], {}
    folder = local_path(arg)
    examples: dict[str, str] = {}
    unknown, patterns = [], set()
    is_ignored = False
    for path in paths:
        if len(paths) > 1 and NO_DATA.fullmatch(os.path.basename(path)):
            is_ignored = True
            continue
        kind = format_of(path)
        if kind is None:
            unknown.append(path)
            continue
        examples.setdefault(kind, path)
        patterns.add(os.path.join(glob.escape(str(folder)), "**", name_pattern(path)))
    if unknown or not examples:
        name = unknown[0] if unknown else arg
        raise ConfigError(
            f"{name}: its name says no format that can be read (.jsonl, .json, .parquet, .arrow, "
            ".txt, .md, .tfrecord, .array_record): set grain_file_type, or convert it"
        )
    if folder.is_dir():
        refuse_splits(arg, [path for path in paths if format_of(path)])
    return (sorted(patterns) if is_ignored and folder.is_dir() else [arg]), examples


def refuse_splits(arg: str, paths: Sequence[str]) -> None:
    """Raise ConfigError if a folder has files of training and of evaluation."""
    matches = [match for path in paths if (match := SPLIT.match(os.path.basename(path)))]
    splits = {match[1].lower() for match in matches}
    if len(splits) > 1 and any(match[2] for match in matches):
        names = " and ".join(sorted(splits))
        raise ConfigError(
            f"{arg} has files of {names}: name those to read, such as "
            f"'{os.path.join(arg, '**', 'train*')}'"
        )


def name_pattern(path: str) -> str:
    """A glob of the files with the same ending: `*.jsonl.gz`, or `*.tfrecord-*` of shards."""
    name = os.path.basename(path)
    match = re.search(r"(\.\w+(?:\.gz)?)(-\d+-of-\d+)?(\.gz)?$", name)
    assert match is not None, "files with a format have an ending"
    return f"*{match[1]}{'-*' if match[2] else ''}{match[3] or ''}"


def format_of(arg: str) -> str | None:
    from maxtext.input_pipeline.formats.files import kind_of

    return kind_of(arg)


def key_hint(arg: str) -> str:
    """The end of a message, if an argument is a key without a value."""
    from maxtext.configs import fields

    return f": write {arg}=VALUE" if arg in fields.KEYS else ""


def unknown_argument(arg: str) -> ConfigError:
    from maxtext.configs import fields, sources

    if hint := key_hint(arg):
        return ConfigError(f"unknown argument {arg!r}{hint}")
    if "/" in arg or arg.startswith((".", "~")) or format_of(arg):
        return ConfigError(f"there is no file or folder {arg}")
    names = [*sources.presets(), *fields.choices("model_name")]
    hint = sources.suggest(arg, names) or f"; shipped presets: {', '.join(sources.presets())}"
    return ConfigError(f"there is no configuration file, model or data {arg!r}{hint}")
