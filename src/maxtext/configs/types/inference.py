"""Decoding, its layouts, server and benchmarks."""

from maxtext.configs.types import inert
from maxtext.configs.types.enums import SamplingStrategy
from maxtext.configs.types.key import (
    DRAFT_MODEL,
    INT64_MAX,
    NGRAM_DRAFTS,
    OTHER_THAN_ROLLOUTS,
    Group,
    key,
)


class InferenceGeneral(Group):
    """Sequence lengths, prompt and prefill behaviour when a model generates text."""

    max_target_length: int = key(
        2048,
        "Longest sequence in tokens: the training row length, and in decoding the prompt plus"
        " the generated text",
        low=1,
    )
    max_prefill_predict_length: int = key(
        64, "Tokens reserved for the prompt; the rest of max_target_length can be generated", low=1
    )
    prompt: str = key(
        "I love to",
        "Text that decode continues; when set for training, the trained model continues it at"
        " the end",
    )
    load_from_prefill_dir: bool = key(
        False,
        "Skip prefill in decode and read a previously saved KV cache from prefill_cache_dir",
        status=inert.JETSTREAM,
    )
    prefill_cache_dir: str = key(
        "",
        "Folder where a prompt's KV cache is saved or read back; empty = prefill caches are "
        "not stored",
        status=inert.JETSTREAM,
    )
    autoregressive_decode_assert: str = key(
        "", "Text that the completion of decode must equal, for tests; empty = no check"
    )
    model_call_mode: str = key(
        "",
        "'inference' skips training-only work such as MoE balance losses from the forward "
        "pass; empty = normal",
        choices=("", "inference"),
        status=inert.ONE_CACHE_LAYOUT,
    )
    use_chunked_prefill: bool = key(
        False,
        "Prefill long prompts in chunks of prefill_chunk_size tokens, which bounds memory and the "
        "time that other requests wait. Not set: true when a model is loaded to generate, with "
        "chunks of a size that depends on the device",
    )
    prefill_chunk_size: int = key(
        256, "Tokens per chunk when use_chunked_prefill=true", low=1, needs="use_chunked_prefill"
    )
    enable_model_warmup: bool = key(
        False,
        "Compile every prefill length and the generate step before the server accepts requests",
    )
    enable_llm_inference_pool: bool = key(
        False,
        "Also expose the endpoints a Google llm_inference_gateway needs to put this server in"
        " its pool",
        status=inert.JETSTREAM,
    )
    multi_sampling: bool = key(
        False, "Draw several completions from one prefill of the same prompt instead of only one"
    )
    return_log_prob: bool = key(
        False, "Return the log probability of each generated token together with its id"
    )


class Decoding(Group):
    """How the next token is chosen from the logits."""

    decode_sampling_strategy: SamplingStrategy = key(
        SamplingStrategy.GREEDY,
        "How the next token is picked: greedy, weighted, nucleus, topk, or composite "
        "(temperature, then top-k, then nucleus)",
    )
    decode_sampling_nucleus_p: int | float = key(
        -1.0,
        "Keep the smallest token set whose probability reaches p in (0, 1]; for nucleus and "
        "composite. -1 = not set",
        low=0,
        high=1,
        special=(-1.0,),
    )
    decode_sampling_top_k: int = key(
        0, "Keep only the k most likely tokens; for topk and composite. 0 = not set", low=0
    )
    decode_sampling_temperature: float = key(
        1.0,
        "Divides the logits before sampling: below 1 sharpens, above 1 flattens; greedy ignores it",
        low=0,
    )


class InferenceLayout(Group):
    """Axis orders in which the KV cache is stored and attended."""

    stack_prefill_result_cache: bool = key(
        False,
        "Stack the per-layer prefill caches into one array, which moves fewer buffers; for "
        "scan_layers=false",
        status=inert.ONE_CACHE_LAYOUT,
    )
    prefill_cache_axis_order: str = key(
        "1,2,0,3",
        "Storage order of the prefill KV cache: a permutation of 0=batch, 1=sequence, "
        "2=heads, 3=head_dim",
        status=inert.ONE_CACHE_LAYOUT,
    )
    ar_cache_axis_order: str = key(
        "1,2,0,3",
        "Storage order of the generate-time KV cache: a permutation of 0=batch, 1=sequence, "
        "2=heads, 3=head_dim",
        status=inert.ONE_CACHE_LAYOUT,
    )
    compute_axis_order: str = key(
        "0,1,2,3",
        "Axis order in which cached attention is computed: '0,1,2,3' (batch, length, heads, "
        "dim) or '0,2,1,3'",
        status=inert.ONE_CACHE_LAYOUT,
    )
    reshape_q: bool = key(
        False,
        "Reshape the decode query into its KV groups before the product with the cache; a "
        "speed choice",
        status=inert.ONE_CACHE_LAYOUT,
    )


class InferenceServer(Group):
    """Which serving program runs, and on which hardware slices."""

    inference_server: str = key(
        "MaxtextInterleavedServer",
        "Which server runs: MaxtextInterleavedServer (prefill and generate share devices) or "
        "a disaggregated one",
        status=inert.JETSTREAM,
    )
    prefill_slice: str = key(
        "v5e-16",
        "TPU slice that does prefill in disaggregated serving, named like v5e-16",
        status=inert.JETSTREAM,
    )
    generate_slice: str = key(
        "v5e-16",
        "TPU slice that does token generation in disaggregated serving, named like v5e-16",
        status=inert.JETSTREAM,
    )


class InferenceBenchmark(Group):
    """The measurements of the prefill and generate speed benchmark."""

    inference_microbenchmark_prefill_lengths: str = key(
        "64,128,256,512,1024", "Prompt lengths in tokens to time, separated by commas"
    )
    inference_microbenchmark_stages: str = key(
        "prefill,generate", "Which phases to time, separated by commas: prefill, generate"
    )
    inference_microbenchmark_loop_iters: int = key(
        10, "Timed repetitions of each benchmark case; more gives steadier averages", low=1
    )
    inference_microbenchmark_log_file_path: str = key(
        "", "JSON file that receives the benchmark results; empty = print only", is_path=True
    )
    inference_microbenchmark_num_samples: list[int] = key(
        [1, 2, 3, 4, 5],
        "Completions per prompt to time, one case for each number; used with multi_sampling",
        needs="multi_sampling",
    )
    inference_metadata_file: str = key(
        "",
        "JSON file of extra labels copied into the benchmark results; empty = none",
        status=inert.JETSTREAM,
    )
    inference_benchmark_test: bool = key(
        False,
        "Marks the run as a short benchmark self-test rather than a measurement to keep",
        status=inert.JETSTREAM,
    )


class EngineMemory(Group):
    """How much memory the caches of the generation engine may take."""

    gpu_memory_utilization: float = key(
        0.95,
        "Part of a device's whole memory, above 0 and at most 1, that weights, programs and caches "
        "may take together, as in vLLM; on a GPU, JAX takes this part when the command starts",
        low=0,
        high=1,
    )
    kv_cache_memory_fraction: float = key(
        0.9,
        "Part of the memory that weights and the temporaries of programs leave, above 0 and at "
        "most 1, that the caches of generation may take",
        low=0,
        high=1,
        needs=OTHER_THAN_ROLLOUTS,
    )


class PrefixCaching(Group):
    """Memory for reusing the KV cache of shared prompt prefixes."""

    enable_prefix_caching: bool = key(
        False, "Reuse the KV cache of prompt prefixes that earlier requests computed"
    )
    prefix_caching_hbm_byte: int = key(
        10000000000,
        "Bytes of device memory that cached prefixes may use (enable_prefix_caching)",
        low=0,
        limit=INT64_MAX,
        needs="enable_prefix_caching",
    )
    prefix_caching_dram_byte: int = key(
        100000000000,
        "Bytes of host memory for prefixes evicted from device memory (enable_prefix_caching)",
        low=0,
        limit=INT64_MAX,
        needs="enable_prefix_caching",
    )


class Speculation(Group):
    """Speculative decoding when a model generates text, with the keys of vLLM's
    --speculative-config. It changes no token."""

    speculative_method: str = key(
        "",
        "Draft the next tokens and verify them in one step: ngram looks them up among the earlier"
        " tokens of the sequence, draft asks a smaller model, mtp the model's own layer for"
        " multi-token prediction, eagle3 an EAGLE-3 head; empty = one token a step",
        choices=("", "ngram", "draft", "mtp", "eagle3"),
    )
    num_speculative_tokens: int = key(
        4, "Tokens that a step drafts for each sequence", low=1, high=32, needs="speculative_method"
    )
    prompt_lookup_max: int = key(
        4, "Longest n-gram that speculative_method=ngram looks up", low=1, needs=NGRAM_DRAFTS
    )
    prompt_lookup_min: int = key(
        2, "Shortest n-gram that speculative_method=ngram looks up", low=1, needs=NGRAM_DRAFTS
    )
    speculative_model_path: str = key(
        "",
        "Folder, or org/name of the Hugging Face Hub, of the model or head that drafts for "
        "speculative_method=draft or eagle3",
        is_path=True,
        needs=DRAFT_MODEL,
    )
    speculative_disable_by_batch_size: int = key(
        32,
        "Most sequences of a decode step that drafts; with more, one token a step is faster",
        low=1,
        needs="speculative_method",
    )
