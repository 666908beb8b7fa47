"""Limits that follow from the type of a key: what counters, float32, text files and local paths can
hold.

Narrower ranges, which follow from the meaning of a key, are `in_range` rules.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from maxtext.common.files import UNPRINTABLE, path_problem
from maxtext.configs.problems import Problem, ProblemKind
from maxtext.configs.provenance import Source
from maxtext.configs.types import Settings

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
FLOAT32_MAX = 3.4028234663852886e38
# 64-bit integers, which never reach a device: bytes, characters, floating-point operations, RoPE
# bases and seeds.
WIDE = {
    "checkpoint_storage_target_data_file_size_bytes",
    "prefix_caching_hbm_byte",
    "prefix_caching_dram_byte",
    "max_corpus_chars",
    "cost_estimate_flops_fwd",
    "cost_estimate_flops_bwd",
    "use_max_logit_estimate",
    "rope_min_timescale",
    "rope_max_timescale",
    "local_rope_max_timescale",
    "global_rope_max_timescale",
    "data_shuffle_seed",
    "init_weights_seed",
    "engram_seed",
}
# Upper bounds of what the program enumerates, far above any model or machine.
COUNTS = {
    "base_num_decoder_layers": 10_000,
    "num_decoder_layers": 10_000,
    "mtp_num_layers": 1_000,
    "num_experts": 1_000_000,
    "mhc_expansion_rate": 1_000,
    "sinkhorn_iterations": 10_000,
    "engram_max_ngram_size": 1_000,
    "grain_worker_count": 10_000,
    "grain_worker_count_eval": 10_000,
    "grain_num_threads": 10_000,
    "grain_num_threads_eval": 10_000,
    "grain_data_source_max_workers": 10_000,
}
# Keys that name files or folders of this machine. hf_path, hf_data_dir and hf_*_files are not among
# them, since `datasets` also opens URLs; nor is olmo_path_remap_from, the former location of data.
PATH_KEYS = {
    "base_config",
    "base_output_directory",
    "run_name",
    "load_parameters_path",
    "load_full_state_path",
    "offline_data_dir",
    "checkpoint_todelete_subdir",
    "checkpoint_todelete_full_path",
    "save_quantized_params_path",
    "local_checkpoint_directory",
    "metrics_file",
    "jax_cache_dir",
    "compiled_trainstep_file",
    "inference_microbenchmark_log_file_path",
    "olmo_index_path",
    "olmo_path_remap_to",
    "grain_train_files",
    "grain_eval_files",
    "grain_train_mixture_config_path",
    "dataset_path",
    "tokenizer_path",
    "chat_template_path",
    "data_template_path",
    "formatting_func_path",  # or a dotted path
    "dataset_processor_path",
    "lora_input_adapters_path",
    "lora_restore_path",
}
# Paths that must stay inside another folder.
INNER_PATHS = {
    "run_name": "base_output_directory",
    "checkpoint_todelete_subdir": "the checkpoints' folder",
}


def problems(config: Settings, keys: Iterable[str]) -> list[Problem]:
    """A problem for each of the keys whose value is beyond the limits of its type."""
    problems = []
    for key in keys:
        value = getattr(config, key)
        reason = value_problem(key, value)
        if not reason and key in PATH_KEYS and is_chosen(config.source(key)):
            reason = local_path_problem(key, value)
        if reason:
            message = f"{key}={abbreviated(value)} ({config.source(key)}) {reason}"
            problems.append(Problem(key, ProblemKind.OUT_OF_RANGE, message))
    return problems


def is_chosen(source: Source) -> bool:
    """False for values of a model's file and defaults, whose paths are not checked."""
    return source.is_user or source.kind == "derived"


def value_problem(key: str, value: Any) -> str | None:
    """What is wrong with the numbers and strings of a value, as the end of a sentence."""
    for leaf in leaves(value):
        if isinstance(leaf, str):
            if "\0" in leaf or has_surrogates(leaf):
                return "has a NUL character, or bytes that are not UTF-8: leave them out"
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            limit = limit_of(key)
            if abs(leaf) > limit:
                return f"is out of range: whole numbers are at most {limit:,} here"
        elif isinstance(leaf, float) and abs(leaf) > FLOAT32_MAX:
            return f"is out of range: numbers are at most {FLOAT32_MAX:.2g}, the largest float32"
    return None


def local_path_problem(key: str, value: Any) -> str | None:
    """Why a value cannot be a path of this machine, as the end of a sentence."""
    if not isinstance(value, str):
        return None
    return path_problem(value) or (outside_folder(key, value) if key in INNER_PATHS else None)


def limit_of(key: str) -> int:
    """The largest magnitude of an integer key."""
    return COUNTS.get(key, INT64_MAX if key in WIDE else INT32_MAX)


def outside_folder(key: str, value: str) -> str | None:
    names = value.split("/")
    if os.path.isabs(value) or any(name in (".", "..") for name in names):
        return (
            f"would be outside of {INNER_PATHS[key]}: use a name without a leading / and without "
            ".. or ."
        )
    return None


def leaves(value: Any) -> Iterator[Any]:
    """The numbers and strings in nested lists and mappings, including keys of mappings."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(key)
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def abbreviated(value: Any) -> str:
    """A value for a message, on one line and at most 60 characters long."""
    text = (
        str(getattr(value, "value", value))
        if isinstance(value, int)
        else repr(getattr(value, "value", value))
    )
    text = UNPRINTABLE.sub("\ufffd", text)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text):,} characters)"
