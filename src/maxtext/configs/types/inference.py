"""Decoding, its layouts, server and benchmarks."""

from maxtext.configs.types.enums import SamplingStrategy
from maxtext.configs.types.group import Group


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
    """Memory for reusing the KV cache of shared prompt prefixes."""

    enable_prefix_caching: bool = False
    prefix_caching_hbm_byte: int = 10000000000
    prefix_caching_dram_byte: int = 100000000000
