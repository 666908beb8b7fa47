"""dataset_type=grain: local files of one kind (grain_file_type), alone or as a weighted mixture.

A mixture is `files,weight;files,weight` in grain_train_files, or a file of
grain_train_mixture_config_path. Where it ends, mixture_stopping_strategy says. Evaluation has no
use for weights: it reads every document of every part once.
"""

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.encode import columns_to_read
from maxtext.input_pipeline.formats import Documents, find_files, open_files
from maxtext.input_pipeline.interface import BatchIterator, ShardSpec, Split
from maxtext.input_pipeline.mixture_config import file_type, parse_mixture
from maxtext.input_pipeline.pipeline import MixtureComponent, document_batches, max_streams_of
from maxtext.input_pipeline.row_formats import RowFormat


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
