"""Tokenizer, batches, and data sources."""

from typing import Literal

from maxtext.configs.types import inert
from maxtext.configs.types.enums import DatasetType, TokenizerType
from maxtext.configs.types.key import (
    INT64_MAX,
    LOSS_OF_EVALUATION,
    PACKED_HERE,
    ROWS_OF_DATA,
    UNTOKENIZED_DATA,
    Group,
    key,
)


class Tokenizer(Group):
    """How text becomes token ids, and how large the vocabulary is."""

    vocab_size: int = key(
        32000,
        "Number of token ids of the embedding and output head; at least the tokenizer's size",
        low=1,
    )
    tokenizer_path: None | str = key(
        None,
        "File, folder or Hugging Face name of the tokenizer; byte: the built-in one; empty: "
        "the one published with the model",
        is_path=True,
    )
    tokenizer_type: TokenizerType = key(
        TokenizerType.SENTENCEPIECE,
        "Format of tokenizer_path: sentencepiece, huggingface or tiktoken; not set: detected "
        "from the file",
    )
    use_chat_template: bool = key(
        False, "Format documents, and prompts when decoding, with the tokenizer's chat template"
    )
    chat_template_path: str = key(
        "",
        "File with a chat template that replaces the tokenizer's own; empty = keep the tokenizer's",
        is_path=True,
    )
    chat_template: str = key(
        "",
        "Chat template as Jinja text, or the name of one of the tokenizer's templates; empty "
        "= the tokenizer's own",
    )
    tokenize_train_data: bool = key(
        True, "Tokenize training text on the fly; false = the data already holds token ids"
    )
    tokenize_eval_data: bool = key(
        True, "Tokenize evaluation text on the fly; false = the data already holds token ids"
    )
    add_bos: bool = key(
        True,
        "Prepend the beginning-of-sequence token to every document",
        needs=UNTOKENIZED_DATA,
    )
    add_eos: bool = key(
        True, "Append the end-of-sequence token to every document", needs=UNTOKENIZED_DATA
    )
    use_truncation: bool = key(
        True,
        "Truncate documents longer than max_target_length; false = continue in further "
        "sequences. Not set: documents of pre-training text are continued, and rows of "
        "fine-tuning are truncated",
        needs=PACKED_HERE,
    )
    num_vocab_tiling: int = key(
        1,
        "Number of tiles in which tokens pass the output head and loss, so that full logits "
        "are never in memory; 1 = one tile",
        low=1,
    )


class DatasetGeneral(Group):
    """Where batches come from, how large and how densely packed they are."""

    dataset_type: DatasetType = key(
        DatasetType.TFDS,
        "Source of batches: synthetic, hf, grain, tfds, c4_mlperf, olmo_grain, or your own, "
        "package.module:function",
    )
    per_device_batch_size: int | float = key(
        12,
        "Sequences per device and step; may be a fraction (0.25 = one sequence over four devices)",
        low=0,
    )
    eval_per_device_batch_size: int | float = key(
        0.0,
        "Sequences per device in an evaluation step; 0 = same as per_device_batch_size",
        low=0,
        needs=LOSS_OF_EVALUATION,
    )
    max_corpus_chars: int = key(
        10000000,
        "Characters of text that `maxtext tokenizer train` uses, spread over all documents",
        low=1,
        limit=INT64_MAX,
    )
    train_data_columns: list[str] = key(
        ["text"],
        "Names of the fields in a training record that hold text. With use_sft or use_dpo: the "
        "columns of one form of rows; if not set, the columns of a row determine its form",
    )
    train_image_column: str | list[str] = key(
        "image",
        "Name, or list of names, of the record field with images for multimodal training",
        status=inert.MULTIMODAL,
    )
    eval_data_columns: list[str] = key(
        ["text"],
        "Names of the fields in an evaluation record that hold text; like train_data_columns",
    )
    eval_image_column: str | list[str] = key(
        "image",
        "Name, or list of names, of the record field with images for multimodal evaluation",
        status=inert.MULTIMODAL,
    )
    packing: bool = key(
        True,
        "Put several short documents in one sequence; segment ids keep them from attending to"
        " each other",
        needs=UNTOKENIZED_DATA,
    )
    grain_packing_type: Literal["first_fit", "best_fit", "concat_then_split"] = key(
        "first_fit",
        "How documents are packed into sequences: first_fit, best_fit (less padding) or "
        "concat_then_split (no padding)",
        needs=PACKED_HERE,
    )
    max_segments_per_seq: int = key(
        -1,
        "Maximum number of documents packed into one sequence; -1 = no limit",
        low=1,
        special=(-1,),
        needs=PACKED_HERE,
    )
    num_epoch: int = key(1, "Epochs over the training data; steps may end the run earlier", low=1)
    expansion_factor_real_data: float = key(
        -1.0,
        "Only one in this many hosts, the first ones, reads data and passes rows on to the "
        "others; -1 = every host reads",
        low=0,
        special=(-1.0,),
    )
    reuse_example_batch: int = key(
        0,
        "1 = train on the first batch repeatedly, to measure speed without the data pipeline;"
        " 0 = off",
        low=0,
    )
    generate_padding_batch_train: bool = key(
        False,
        "Pad the last training batch, and use the rest of other data streams, instead of ending",
    )
    generate_padding_batch_eval: bool = key(
        False,
        "Pad evaluation to eval_steps batches, so that hosts need no synchronization; every "
        "example counts either way",
    )
    enable_rampup_batch_size: bool = key(
        False,
        "Start training with a small batch and grow it in stages up to per_device_batch_size",
        needs=ROWS_OF_DATA,
    )
    per_device_batch_size_start: float = key(
        4.0,
        "Sequences per device in the first ramp-up stage; needs enable_rampup_batch_size",
        low=0,
    )
    per_device_batch_size_increment: float = key(
        2.0,
        "Sequences per device added at every ramp-up stage; needs enable_rampup_batch_size",
        low=0,
    )
    global_rampup_samples: int = key(
        500,
        "Sequences over all devices for the whole ramp-up, divided equally among its stages; "
        "a stage ends with the step that reaches its share, so the ramp-up ends less than one"
        " batch late",
        low=1,
    )
    colocated_python_data_input: bool = key(
        False,
        "On Pathways, read data on the accelerator hosts rather than on the controller",
        status=inert.PATHWAYS,
    )


class TfdsDataset(Group):
    """Which TensorFlow Datasets corpus and splits to read."""

    dataset_path: str = key(
        "",
        "Folder or bucket with the prepared TFDS (or c4_mlperf) data, the data_dir of TFDS",
        is_path=True,
    )
    dataset_name: str = key("c4/en:3.0.1", "TFDS dataset to train on, as name/config:version")
    eval_dataset_name: str = key(
        "c4/en:3.0.1", "TFDS dataset to evaluate on, as name/config:version"
    )
    train_split: str = key(
        "train", "Split that is used for training, such as train; serves TFDS and Hugging Face data"
    )
    eval_split: str = key(
        "validation", "TFDS split that is used for evaluation, such as validation"
    )


class HfDataset(Group):
    """Which Hugging Face dataset, subset and files to read."""

    hf_path: str = key(
        "",
        "Hugging Face dataset name, or a loader such as json or parquet together with "
        "hf_train_files",
    )
    hf_name: None | str = key(
        None, "Subset (configuration) of the Hugging Face dataset, such as en; none = its default"
    )
    hf_data_dir: None | str = key(
        None, "Folder inside the Hugging Face dataset to read from; none = all of it"
    )
    hf_train_files: None | str = key(
        None,
        "Training files for the loader in hf_path, as a path or glob; none = the dataset's own",
    )
    hf_eval_split: None | str = key(
        None,
        "Split of the Hugging Face dataset to evaluate on; none = no split, set hf_eval_files"
        " instead",
    )
    hf_eval_files: None | str = key(
        None,
        "Evaluation files for the loader in hf_path, as a path or glob; none = the dataset's own",
    )
    hf_access_token: None | str = key(
        None,
        "Hugging Face token for gated datasets and tokenizers; none = anonymous or the "
        "machine's login",
    )


class GrainDataset(Group):
    """Which files Grain reads, and with how many workers and buffers."""

    grain_train_files: str = key(
        "",
        "Files, folders or globs of training data, separated by commas; {stdlib} is the "
        "Python standard library; a mixture is files,weight;files,weight",
        is_path=True,
    )
    grain_eval_files: str = key(
        "", "Evaluation data, written as in grain_train_files; empty: none", is_path=True
    )
    grain_train_mixture_config_path: str = key(
        "",
        "JSON or YAML file of training sources, {name: {path: files, weight: number}}; "
        "replaces grain_train_files",
        is_path=True,
    )
    grain_file_type: str = key(
        "arrayrecord",
        "Format of the Grain files: arrayrecord, parquet, arrow, tfrecord, jsonl (also JSON "
        "arrays), or text (a file is a document). Not set: by the names of the files, such as"
        " chats.jsonl",
        choices=("arrayrecord", "parquet", "arrow", "tfrecord", "jsonl", "text"),
    )
    grain_use_elastic_iterator: bool = key(
        False,
        "With data_streams=-1, use one data stream per row of the batch, so that no two hosts"
        " read the same records",
    )
    grain_worker_count: int = key(
        1,
        "Processes that prepare training batches; 0 = in the main process, -1 = as many as "
        "cores and grain_ram_budget_mb allow",
        low=0,
        special=(-1,),
        limit=10_000,
    )
    grain_per_worker_buffer_size: int = key(
        1, "Training batches that each worker process prefetches", low=1
    )
    grain_worker_count_eval: int = key(
        1,
        "Processes that prepare evaluation batches; 0 = in the main process, -1 = as for "
        "grain_worker_count",
        low=0,
        special=(-1,),
        limit=10_000,
    )
    grain_per_worker_buffer_size_eval: int = key(
        1, "Evaluation batches that each worker process prefetches", low=1
    )
    grain_ram_budget_mb: int = key(
        1024,
        "Host memory in MB for prefetched documents, and for workers when grain_worker_count=-1",
        low=1,
    )
    grain_num_threads: int = key(
        16, "Threads that read training records from storage, per worker", low=0, limit=10_000
    )
    grain_prefetch_buffer_size: int = key(
        500, "Training records that reader threads prefetch, per worker", low=0
    )
    grain_num_threads_eval: int = key(
        16, "Threads that read evaluation records from storage, per worker", low=0, limit=10_000
    )
    grain_prefetch_buffer_size_eval: int = key(
        500, "Evaluation records that reader threads prefetch, per worker", low=0
    )
    grain_data_source_max_workers: int = key(
        16, "Threads that open and index files at start-up", low=1, limit=10_000
    )
    grain_shuffle_buffer_size: int = key(
        100,
        "Size in rows of the shuffle buffer, in addition to shuffling documents; 1: none",
        low=1,
    )


class OlmoGrainDataset(Group):
    """How to find and filter the pre-tokenized numpy data of OLMo."""

    olmo_index_path: str = key(
        "",
        "Index file that lists OLMo's tokenized numpy files and lengths; needed for "
        "dataset_type=olmo_grain",
        is_path=True,
    )
    olmo_path_remap_from: str = key(
        "",
        "Path prefix in the OLMo index to replace, when the data was moved; empty = no replacement",
    )
    olmo_path_remap_to: str = key(
        "",
        "Path prefix that replaces olmo_path_remap_from, such as your local folder or bucket",
        is_path=True,
    )
    olmo_apply_ngram_filter: bool = key(
        True,
        "Mask sequences that repeat the same n-gram many times out of the loss, as OLMo's "
        "training does",
    )


class BadData(Group):
    """The treatment of records that cannot be used."""

    max_bad_records: int = key(
        0,
        "Records of a data stream that may be skipped, and counted in the log, because they "
        "cannot be read or have no text; -1 = any number; 0 = the first one stops the run",
        low=0,
        special=(-1,),
        needs=UNTOKENIZED_DATA,
    )


class DataOrder(Group):
    """How documents are distributed over the rows of a batch, and where a mixture ends."""

    data_streams: int = key(
        -1,
        "Number of data streams that fill the rows of a batch round-robin, each with its own "
        "documents; changing it changes the batches. Raise it if there are more reading hosts"
        " or workers than data streams; -1 = at most 4, by batch size and data",
        low=1,
        special=(-1,),
    )
    mixture_stopping_strategy: Literal["first_exhausted", "all_exhausted"] = key(
        "first_exhausted",
        "Where a weighted training mixture ends: first_exhausted = when one source has been "
        "read num_epoch times; all_exhausted = when every source has, repeating those that "
        "end earlier. Evaluation reads every document once",
    )
