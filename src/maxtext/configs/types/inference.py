"""Decoding, its layouts, server and benchmarks."""

from maxtext.configs.types.enums import SamplingStrategy
from maxtext.configs.types.group import Group, acts_only, in_range, one_of, rule


class InferenceGeneral(Group):
    """Sequence lengths, prompt and prefill behaviour when a model generates text."""

    max_target_length: int = 2048
    max_prefill_predict_length: int = 64
    prompt: str = "I love to"
    load_from_prefill_dir: bool = False
    prefill_cache_dir: str = ""
    autoregressive_decode_assert: str = ""
    model_call_mode: str = ""
    use_chunked_prefill: bool = False
    prefill_chunk_size: int = 256
    enable_model_warmup: bool = False
    enable_llm_inference_pool: bool = False
    multi_sampling: bool = False
    return_log_prob: bool = False


class Decoding(Group):
    """How the next token is chosen from the logits."""

    decode_sampling_strategy: SamplingStrategy = SamplingStrategy.GREEDY
    decode_sampling_nucleus_p: int | float = -1.0
    decode_sampling_top_k: int = 0
    decode_sampling_temperature: float = 1.0


class InferenceLayout(Group):
    """Axis orders in which the KV cache is stored and attended."""

    stack_prefill_result_cache: bool = False
    prefill_cache_axis_order: str = "1,2,0,3"
    ar_cache_axis_order: str = "1,2,0,3"
    compute_axis_order: str = "0,1,2,3"
    reshape_q: bool = False


class InferenceServer(Group):
    """Which serving program runs, and on which hardware slices."""

    inference_server: str = "MaxtextInterleavedServer"
    prefill_slice: str = "v5e-16"
    generate_slice: str = "v5e-16"


class InferenceBenchmark(Group):
    """What the prefill and generate speed benchmark measures and records."""

    inference_microbenchmark_prefill_lengths: str = "64,128,256,512,1024"
    inference_microbenchmark_stages: str = "prefill,generate"
    inference_microbenchmark_loop_iters: int = 10
    inference_microbenchmark_log_file_path: str = ""
    inference_microbenchmark_num_samples: list[int] = [1, 2, 3, 4, 5]
    inference_metadata_file: str = ""
    inference_benchmark_test: bool = False


class PrefixCaching(Group):
    """Memory for reusing the KV cache of shared prompt beginnings."""

    enable_prefix_caching: bool = False
    prefix_caching_hbm_byte: int = 10000000000
    prefix_caching_dram_byte: int = 100000000000


in_range(1, None, "max_target_length", "max_prefill_predict_length", "prefill_chunk_size")
in_range(1, None, "inference_microbenchmark_loop_iters")
in_range(0, None, "decode_sampling_top_k", "decode_sampling_temperature", "prefix_caching_hbm_byte")
in_range(0, None, "prefix_caching_dram_byte")
in_range(0, 1, "decode_sampling_nucleus_p", special=(-1.0,))
one_of("model_call_mode", "", "inference")

acts_only(lambda c: c.use_chunked_prefill, "use_chunked_prefill=true", "prefill_chunk_size")
acts_only(lambda c: c.multi_sampling, "multi_sampling=true", "inference_microbenchmark_num_samples")
acts_only(lambda c: c.enable_prefix_caching, "enable_prefix_caching=true", "prefix_caching_hbm_byte",
          "prefix_caching_dram_byte")  # fmt: skip
acts_only(lambda c: c.attention == "paged", "attention=paged", "pagedattn_num_pages")
acts_only(lambda c: c.attention == "paged" or c.enable_prefix_caching, "attention=paged or enable_prefix_caching=true",
          "pagedattn_tokens_per_page", "pagedattn_max_pages_per_group")  # fmt: skip


@rule
def prompts_fit_in_the_sequence(c):
    if c.use_chunked_prefill and c.max_prefill_predict_length > c.max_target_length:
        return (
            f"max_prefill_predict_length={c.max_prefill_predict_length} is above "
            f"max_target_length={c.max_target_length}: the prompt is part of the sequence"
        )
    return None


@rule
def sampling_has_its_parameter(c):
    strategy = c.decode_sampling_strategy.value
    if strategy == "nucleus" and c.decode_sampling_nucleus_p <= 0:
        return "decode_sampling_strategy=nucleus needs decode_sampling_nucleus_p, e.g. 0.95"
    if strategy == "topk" and c.decode_sampling_top_k < 1:
        return "decode_sampling_strategy=topk needs decode_sampling_top_k, e.g. 50"
    if strategy == "composite" and (
        c.decode_sampling_nucleus_p <= 0 or c.decode_sampling_top_k < 1
    ):
        return "decode_sampling_strategy=composite needs decode_sampling_top_k and decode_sampling_nucleus_p"
    return None


@rule
def axis_orders_are_permutations(c):
    for key in ("prefill_cache_axis_order", "ar_cache_axis_order", "compute_axis_order"):
        if sorted(getattr(c, key).replace(" ", "").split(",")) != ["0", "1", "2", "3"]:
            return f"{key}={getattr(c, key)!r} is not an order of the axes 0,1,2,3"
    return None


@rule
def benchmark_stages_are_known(c):
    unknown = set(c.inference_microbenchmark_stages.replace(" ", "").split(",")) - {
        "prefill",
        "generate",
    }
    if unknown:
        return f"inference_microbenchmark_stages has unknown stages {', '.join(sorted(unknown))}: use prefill,generate"
    return None
