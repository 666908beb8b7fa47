"""Tokenizer, batches, and the sources they come from."""

from typing import Literal

from maxtext.configs.types.enums import DatasetType, TokenizerType
from maxtext.configs.types.group import Group, acts_only, derived_rule, in_range, one_of, rule


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
    """How the rows of a batch are dealt from the documents, and where a mixture ends."""

    data_streams: int = -1
    mixture_stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"


one_of("grain_file_type", "arrayrecord", "parquet", "arrow", "tfrecord", "jsonl", "text")
in_range(
    1,
    None,
    "vocab_size",
    "num_vocab_tiling",
    "num_epoch",
    "max_corpus_chars",
    "global_rampup_samples",
)
in_range(1, None, "max_segments_per_seq", "data_streams", special=(-1,))
in_range(0, None, "per_device_batch_size", "eval_per_device_batch_size", "reuse_example_batch")
in_range(0, None, "per_device_batch_size_start", "per_device_batch_size_increment")
in_range(0, None, "expansion_factor_real_data", special=(-1.0,))
in_range(
    1, None, "grain_shuffle_buffer_size", "grain_ram_budget_mb", "grain_data_source_max_workers"
)
in_range(0, None, "grain_worker_count", "grain_worker_count_eval", special=(-1,))
in_range(1, None, "grain_per_worker_buffer_size", "grain_per_worker_buffer_size_eval")
in_range(0, None, "grain_num_threads", "grain_num_threads_eval", "grain_prefetch_buffer_size")
in_range(0, None, "grain_prefetch_buffer_size_eval")
in_range(0, None, "max_bad_records", special=(-1,))
acts_only(
    lambda c: c.dataset_type not in (DatasetType.C4MLPERF, DatasetType.OLMO_GRAIN),
    "another dataset_type than c4_mlperf and olmo_grain, which fill rows in a way of their own",
    "grain_packing_type", "max_segments_per_seq", "use_truncation",
)  # fmt: skip
acts_only(
    lambda c: c.dataset_type is not DatasetType.OLMO_GRAIN,
    "another dataset_type than olmo_grain, whose data is tokens",
    "packing", "add_bos", "add_eos", "max_bad_records",
)  # fmt: skip


@rule
def tiles_divide_the_vocabulary_batch(c):
    if c.num_vocab_tiling > 1 and c.max_target_length % c.num_vocab_tiling:
        return (
            f"num_vocab_tiling={c.num_vocab_tiling} does not divide max_target_length={c.max_target_length}: "
            "use a divisor"
        )
    return None


@derived_rule
def a_step_has_at_least_one_sequence(c):
    if c.global_batch_size_to_train_on < 1:
        return (
            f"per_device_batch_size={c.per_device_batch_size} on {c.num_target_devices} devices is less than one "
            "sequence a step: increase it"
        )
    return None


@derived_rule
def fractional_batches_fill_the_devices(c):
    product = c.per_device_batch_size * c.num_target_devices
    if abs(product - round(product)) > 1e-6:
        return (
            f"per_device_batch_size={c.per_device_batch_size} on {c.num_target_devices} devices makes {product:g} "
            "sequences: choose a value that makes a whole number"
        )
    return None


@rule
def rampup_grows_to_the_full_batch(c):
    if not c.enable_rampup_batch_size:
        return None
    start, step, full = (
        c.per_device_batch_size_start,
        c.per_device_batch_size_increment,
        c.per_device_batch_size,
    )
    if (
        step <= 0
        or start >= full
        or abs((full - start) / step - round((full - start) / step)) > 1e-6
    ):
        return (
            f"batch ramp-up from {start} by {step} does not end at per_device_batch_size={full}: "
            "choose per_device_batch_size_start below it, and an increment that divides the difference"
        )
    return None


@rule
def rampup_counts_what_is_loaded(c):
    if c.enable_rampup_batch_size and (
        c.expansion_factor_real_data > 0 or c.per_device_batch_size_start < 1
    ):
        return (
            "enable_rampup_batch_size works with whole sequences on every device: leave expansion_factor_real_data -1 "
            "and start from per_device_batch_size_start of at least 1"
        )
    return None


@rule
def the_benchmark_is_packed(c):
    if c.dataset_type is DatasetType.C4MLPERF and not c.packing:
        return "dataset_type=c4_mlperf fills rows with documents one after the other: leave packing=true"
    return None


@derived_rule
def reading_hosts_are_a_whole_part(c):
    factor = c.expansion_factor_real_data
    if factor > 0 and (
        factor < 1 or factor != round(factor) or c.num_target_devices % round(factor)
    ):
        return (
            f"expansion_factor_real_data={factor:g} does not divide {c.num_target_devices} devices: choose a whole "
            "number that does, or -1"
        )
    return None


@rule
def one_chat_template(c):
    if c.chat_template and c.chat_template_path:
        return "chat_template and chat_template_path both give the template: keep one"
    return None


@rule
def remapped_paths_come_in_pairs(c):
    if bool(c.olmo_path_remap_from) != bool(c.olmo_path_remap_to):
        return "olmo_path_remap_from and olmo_path_remap_to go together: set both or neither"
    return None
