"""dataset_type=c4_mlperf: C4 as MLPerf's GPT-3 benchmark reads it, from a prepared dataset as for
tfds.

Training concatenates the documents with their special tokens and splits them where a row ends. In
evaluation, each record is a row; with tokenize_eval_data=false it holds token ids, in the column
`ids` or that of eval_data_columns.
"""

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.interface import BatchIterator, ShardSpec, Split
from maxtext.input_pipeline.pipeline import document_batches, max_streams_of
from maxtext.input_pipeline.row_formats import RowFormat
from maxtext.input_pipeline.tfds_source import load_components


def c4_mlperf_source(
    config: MaxTextConfig, split: Split, row_format: RowFormat, shard: ShardSpec
) -> BatchIterator | None:
    config = as_benchmark(config, split)
    key = "dataset_name" if split is Split.TRAIN else "eval_dataset_name"
    return document_batches(
        config, split, row_format, shard, load_components(config, split, row_format), key
    )


def max_data_streams(config: MaxTextConfig, split: Split, row_format: RowFormat) -> int:
    return max_streams_of(load_components(as_benchmark(config, split), split, row_format))


def as_benchmark(config: MaxTextConfig, split: Split) -> MaxTextConfig:
    if split is Split.TRAIN:
        rows = {
            "grain_packing_type": "concat_then_split",
            "use_truncation": False,
            "max_segments_per_seq": -1,
        }
        return config.model_copy(update=rows)
    ids = not config.tokenize_eval_data and config.eval_data_columns == ["text"]
    columns = ["ids"] if ids else config.eval_data_columns
    return config.model_copy(
        update={"packing": False, "use_truncation": True, "eval_data_columns": columns}
    )
