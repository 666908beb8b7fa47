"""dataset_type=grain: local files of one kind (grain_file_type), alone or as a weighted mixture.

`parse_mixture` returns the parts of a mixture as (key, files, weight). They are written as
`files,weight;files,weight` in grain_train_files, or as entries of the file
grain_train_mixture_config_path. mixture_stopping_strategy says where a mixture ends. Evaluation has
no use for weights: it reads every document of every part once.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import yaml

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.formats import Documents, find_files, kind_of, open_files
from maxtext.input_pipeline.interface import BatchIterator, ShardSpec, Split
from maxtext.input_pipeline.pipeline import MixtureComponent, document_batches, max_streams_of
from maxtext.input_pipeline.row_formats import RowFormat, columns_to_read

Entry = tuple[str, str, float]  # (key that names it, files, weight)


def file_type(config: MaxTextConfig, files: Sequence[str]) -> str:
    """grain_file_type; if it is not set, the format that the names of all files say."""
    kinds = {kind_of(file) for file in files}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    is_set = config.source("grain_file_type").kind != "default"
    return config.grain_file_type if is_set or kind is None else kind


def parse_mixture(config: MaxTextConfig, split: Split) -> list[Entry]:
    path = config.grain_train_mixture_config_path.strip()
    if split is Split.EVAL:
        return parse_inline("grain_eval_files", config.grain_eval_files)
    if path and config.grain_train_files.strip():
        raise ConfigError(
            "grain_train_files and grain_train_mixture_config_path both name the data: keep one"
        )
    return (
        read_mixture_file(path)
        if path
        else parse_inline("grain_train_files", config.grain_train_files)
    )


def parse_inline(key: str, value: str) -> list[Entry]:
    """Parse `files,weight;files,weight`, where files may contain commas. Without `;` it is not a
    mixture.
    """
    if ";" not in value:
        return [(key, value, 1.0)]
    entries = []
    for part in filter(None, (part.strip() for part in value.split(";"))):
        files, comma, weight = part.rpartition(",")
        if not comma or not files.strip():
            raise ConfigError(
                f"{key}: {part!r} of the mixture has no weight, write it as "
                "files,weight;files,weight"
            )
        entries.append((key, files, parse_weight(f"{key}: {part!r}", weight)))
    if not entries:
        raise ConfigError(f"{key}={value}: names no files")
    return entries


def read_mixture_file(path: str) -> list[Entry]:
    """JSON or YAML of `{name: {path: files, weight: number}}`, or a list of such entries."""
    key = "grain_train_mixture_config_path"
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 (byte {error.start})") from error
    try:
        table: object = (
            json.loads(text) if text.lstrip().startswith(("{", "[")) else yaml.safe_load(text)
        )
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key}: {path} is neither JSON nor YAML ({reason})") from error
    items = (
        table.items()
        if isinstance(table, dict)
        else enumerate(table)
        if isinstance(table, list)
        else ()
    )
    entries = []
    for name, entry in items:
        if not (
            isinstance(entry, dict) and isinstance(entry.get("path"), str) and "weight" in entry
        ):
            raise ConfigError(f"{key}: entry {name} of {path} needs a path and a weight")
        entries.append(
            (
                f"{key}, entry {name}",
                entry["path"],
                parse_weight(f"{key}: entry {name}", entry["weight"]),
            )
        )
    if not entries:
        raise ConfigError(
            f"{key}: {path} has no entries, write them as {{name: {{path: files, weight: number}}}}"
        )
    return entries


def parse_weight(where: str, value: str | float) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where} has the weight {value!r}, which is not a number") from None
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError(
            f"{where} has the weight {value}: weights are above 0, leave out what is not wanted"
        )
    return weight


def grain_source(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator | None:
    components = load_components(config, split, row_format)
    return (
        document_batches(config, split, row_format, shard, components, f"grain_{split.value}_files")
        if components
        else None
    )


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    return max_streams_of(load_components(config, split, row_format))


def load_components(
    config: MaxTextConfig, split: Split, row_format: RowFormat
) -> list[MixtureComponent]:
    """Empty when no evaluation files are named."""
    if split is Split.EVAL and not config.grain_eval_files.strip():
        return []
    columns = columns_to_read(config, split, row_format)
    threads = config.grain_data_source_max_workers
    components = []
    for key, value, weight in parse_mixture(config, split):
        files = find_files(key, value)
        kind = file_type(config, files)
        try:
            components.append(MixtureComponent(open_files(files, kind, columns, threads), weight))
        except ConfigError as error:
            raise ConfigError(
                f"{key} with grain_file_type={kind}: {error.problems[0]}", *error.problems[1:]
            ) from error
    if split is Split.EVAL and len(components) > 1:
        return [MixtureComponent(Documents([component.documents for component in components]))]
    return components
