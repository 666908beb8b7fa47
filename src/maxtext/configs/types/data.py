"""Tokenizer, batches, and data sources."""

from typing import Literal

from maxtext.configs.types.enums import DatasetType, TokenizerType
from maxtext.configs.types.group import Group


class Tokenizer(Group):
    """How text becomes token ids, and how large the vocabulary is."""

    vocab_size: int = 32000
    tokenizer_path: None | str = None
    tokenizer_type: TokenizerType = TokenizerType.SENTENCEPIECE
    use_chat_template: bool = False
    chat_template_path: str = ""
    chat_template: str = ""
    tokenize_train_data: bool = True
    tokenize_eval_data: bool = True
    add_bos: bool = True
    add_eos: bool = True
    use_truncation: bool = True
    num_vocab_tiling: int = 1


class DatasetGeneral(Group):
    """Where batches come from, how large and how densely packed they are."""

    dataset_type: DatasetType = DatasetType.TFDS
    per_device_batch_size: int | float = 12
    eval_per_device_batch_size: int | float = 0.0
    max_corpus_chars: int = 10000000
    train_data_columns: list[str] = ["text"]
    train_image_column: str | list[str] = "image"
    eval_data_columns: list[str] = ["text"]
    eval_image_column: str | list[str] = "image"
    packing: bool = True
    grain_packing_type: Literal["first_fit", "best_fit", "concat_then_split"] = "first_fit"
    max_segments_per_seq: int = -1
    num_epoch: int = 1
    expansion_factor_real_data: float = -1.0
    reuse_example_batch: int = 0
    generate_padding_batch_train: bool = False
    generate_padding_batch_eval: bool = False
    enable_rampup_batch_size: bool = False
    per_device_batch_size_start: float = 4.0
    per_device_batch_size_increment: float = 2.0
    global_rampup_samples: int = 500
    colocated_python_data_input: bool = False


class TfdsDataset(Group):
    """Which TensorFlow Datasets corpus and splits to read."""

    dataset_path: str = ""
    dataset_name: str = "c4/en:3.0.1"
    eval_dataset_name: str = "c4/en:3.0.1"
    train_split: str = "train"
    eval_split: str = "validation"


class HfDataset(Group):
    """Which Hugging Face dataset, subset and files to read."""

    hf_path: str = ""
    hf_name: None | str = None
    hf_data_dir: None | str = None
    hf_train_files: None | str = None
    hf_eval_split: None | str = None
    hf_eval_files: None | str = None
    hf_access_token: None | str = None


class GrainDataset(Group):
    """Which files Grain reads, and with how many workers and buffers."""

    grain_train_files: str = ""
    grain_eval_files: str = ""
    grain_train_mixture_config_path: str = ""
    grain_file_type: str = "arrayrecord"
    grain_use_elastic_iterator: bool = False
    grain_worker_count: int = 1
    grain_per_worker_buffer_size: int = 1
    grain_worker_count_eval: int = 1
    grain_per_worker_buffer_size_eval: int = 1
    grain_ram_budget_mb: int = 1024
    grain_num_threads: int = 16
    grain_prefetch_buffer_size: int = 500
    grain_num_threads_eval: int = 16
    grain_prefetch_buffer_size_eval: int = 500
    grain_data_source_max_workers: int = 16
    grain_shuffle_buffer_size: int = 100


class OlmoGrainDataset(Group):
    """How to find and filter the pre-tokenized numpy data of OLMo."""

    olmo_index_path: str = ""
    olmo_path_remap_from: str = ""
    olmo_path_remap_to: str = ""
    olmo_apply_ngram_filter: bool = True


class BadData(Group):
    """What happens to records that cannot be used."""

    max_bad_records: int = 0


class DataOrder(Group):
    """How documents are distributed over the rows of a batch, and where a mixture ends."""

    data_streams: int = -1
    mixture_stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
