"""The words of a command line that are not key=value: [FILE] [MODEL] [DATA ...].

- FILE: as the first word a shipped preset or any YAML file; elsewhere a name that ends in .yml.
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
    the models, in order. Raises ConfigError for words that are nothing of these.
    """
    words, overrides = split_words(args)
    set_keys = {override.partition("=")[0]: override for override in overrides}
    file = words.pop(0) if presets and words and names_file(words[0], set_keys) else None
    free = [key for key in models if key not in set_keys]
    named: list[str] = []
    data_words: list[str] = []
    for word in words:
        if word.endswith(YAML_ENDINGS):
            if file is not None:
                raise ConfigError(
                    f"{file} and {word} are two configuration files: keep one, whose base_config "
                    "may name the other"
                )
            file = word
        elif override := model_override(word, free, bool(models)):
            named.append(override)
            free.pop(0)
        elif data is None and free:  # no other word is left: who opens the model checks it
            named.append(f"{free.pop(0)}={word}")
        else:
            data_words.append(word)
    if data_words and data is None:
        raise ConfigError(f"unknown argument {data_words[0]!r}{key_hint(data_words[0])}")
    return file, [*named, *data_overrides(data_words, data, set_keys), *overrides]


def split_words(args: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into (words, key=value overrides)."""
    words = [arg for arg in args if is_word(arg)]
    return words, [arg for arg in args if not is_word(arg)]


def is_word(arg: str) -> bool:
    key, equals, _ = arg.partition("=")
    return not equals or "/" in key or os.path.exists(arg)  # a path may have a = in it


def names_file(word: str, set_keys: dict[str, str]) -> bool:
    """Whether the first word is a configuration file or a preset."""
    from maxtext.configs import sources

    path = local_path(word)
    is_path = "/" in word or word.startswith((".", "~"))
    if path.is_dir() and is_path and not path.with_name(f"{path.name}.yml").is_file():
        return False  # a folder that is written as a path may have the name of a preset
    if path.is_file() and (format_of(word) or "grain_file_type" in set_keys):
        return False
    if word.endswith((*YAML_ENDINGS, *WEIGHT_ENDINGS)):
        return word.endswith(YAML_ENDINGS)
    try:
        sources.find_file(word)
    except ConfigError:
        return False
    return True


def model_override(word: str, free: Sequence[str], takes_models: bool) -> str | None:
    """The key=value that names a model, or None if the word is none. `free`: the keys of models
    that are not set yet.
    """
    from maxtext.configs import fields

    path = local_path(word)
    is_missing = not path.exists() and not glob.has_magic(word)
    is_name = is_missing and word in fields.choices("model_name")
    is_model = path.is_dir() and is_model_folder(path)
    if word.endswith(WEIGHT_ENDINGS) and path.is_file():
        raise ConfigError(f"{word} is a file of weights: name the folder that it is in")
    if (is_name or is_model) and not free:
        reason = "another one is named" if takes_models else "this command takes none"
        raise ConfigError(f"{word} is a model, and {reason}: leave one out")
    if is_model or (is_missing and free and is_hub_name(word) and not format_of(word)):
        return f"{free[0]}={word}"
    return f"{free[0].replace(MODEL_KEY, 'model_name')}={word}" if is_name else None


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


def data_overrides(words: list[str], data: str | None, set_keys: dict[str, str]) -> list[str]:
    """The key=value overrides that name data. Raises ConfigError if its files are missing, or are
    of several formats or of an unknown one.
    """
    if not words:
        return []
    assert data is not None, "only commands with data get here"
    key = FILES_KEYS[data]
    for other in (key, f"hf_{data}_files", "hf_path", "dataset_type"):
        if other in set_keys and set_keys[other] != "dataset_type=grain":
            raise ConfigError(
                f"{words[0]} names the data, and so does {set_keys[other]}: leave one out"
            )
    if not has_files(words[0]) and is_hub_name(words[0]) and not format_of(words[0]):
        if len(words) > 1:
            raise ConfigError(
                f"there is no file or folder {words[0]}, and a dataset of the Hub comes alone"
            )
        return ["dataset_type=hf", f"hf_path={words[0]}"]
    file_type = set_keys.get("grain_file_type", "").partition("=")[2]
    files: list[str] = []
    formats: dict[str, str] = {}  # with an example of each
    for word in words:
        if re.search("[,;]", word):
            raise ConfigError(
                f"{word}: separate files by spaces; a mixture is written {key}=FILES,WEIGHT;…"
            )
        if not has_files(word):
            raise unknown_word(word)
        patterns, examples = data_files(word, bool(file_type))
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


def has_files(word: str) -> bool:
    return local_path(word).exists() or glob.has_magic(word) or "{stdlib}" in word


def data_files(word: str, is_known: bool) -> tuple[list[str], dict[str, str]]:
    """(files, folders and globs to read, an example of each format) for a word. `is_known`: a key
    says the format.
    """
    from maxtext.input_pipeline.formats.files import find_files

    paths = find_files("the data", word)
    if is_known:
        return [word], {}
    folder = local_path(word)
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
        name = unknown[0] if unknown else word
        raise ConfigError(
            f"{name}: its name says no format that can be read (.jsonl, .json, .parquet, .arrow, "
            ".txt, .md, .tfrecord, .array_record): set grain_file_type, or convert it"
        )
    if folder.is_dir():
        refuse_splits(word, [path for path in paths if format_of(path)])
    return (sorted(patterns) if is_ignored and folder.is_dir() else [word]), examples


def refuse_splits(word: str, paths: Sequence[str]) -> None:
    """Raise ConfigError if a folder has files of training and of evaluation."""
    matches = [match for path in paths if (match := SPLIT.match(os.path.basename(path)))]
    splits = {match[1].lower() for match in matches}
    if len(splits) > 1 and any(match[2] for match in matches):
        names = " and ".join(sorted(splits))
        raise ConfigError(
            f"{word} has files of {names}: name those to read, such as "
            f"'{os.path.join(word, '**', 'train*')}'"
        )


def name_pattern(path: str) -> str:
    """A glob of the files with the same ending: `*.jsonl.gz`, or `*.tfrecord-*` of shards."""
    name = os.path.basename(path)
    match = re.search(r"(\.\w+(?:\.gz)?)(-\d+-of-\d+)?(\.gz)?$", name)
    assert match is not None, "files with a format have an ending"
    return f"*{match[1]}{'-*' if match[2] else ''}{match[3] or ''}"


def format_of(word: str) -> str | None:
    from maxtext.input_pipeline.formats.files import kind_of

    return kind_of(word)


def key_hint(word: str) -> str:
    """The end of a message, if a word is a key without a value."""
    from maxtext.configs import fields

    return f": write {word}=VALUE" if word in fields.KEYS else ""


def unknown_word(word: str) -> ConfigError:
    from maxtext.configs import fields, sources

    if hint := key_hint(word):
        return ConfigError(f"unknown argument {word!r}{hint}")
    if "/" in word or word.startswith((".", "~")) or format_of(word):
        return ConfigError(f"there is no file or folder {word}")
    names = [*sources.presets(), *fields.choices("model_name")]
    hint = sources.suggest(word, names) or f"; shipped presets: {', '.join(sources.presets())}"
    return ConfigError(f"there is no configuration file, model or data {word!r}{hint}")
