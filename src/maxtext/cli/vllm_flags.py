"""Flags of `vllm serve` that `maxtext serve` takes: those with a meaning here stand for keys, and
the others are refused with a sentence that says what to use. vLLM takes `_` for `-`, as all options
here do.
"""

import json

from maxtext.cli.arguments import ANY_TEXT, Option
from maxtext.common.errors import ConfigError

DTYPES = {"half": "float16", "float": "float32"}
QUANTIZED_CACHES = {"int8": "int8", "fp8": "fp8", "fp8_e4m3": "fp8"}
KV_CACHE_DTYPES: dict[str, list[str]] = {"auto": []} | {
    name: ["quantize_kvcache=true", f"kv_quant_dtype={dtype}"]
    for name, dtype in QUANTIZED_CACHES.items()
}


def dtype_overrides(value: str) -> list[str]:
    """auto is our default: the dtype of the key, bfloat16."""
    return [] if value == "auto" else [f"dtype={DTYPES.get(value, value)}"]


def quantization_overrides(value: str) -> list[str]:
    if value not in ("fp8", "int8", "int4", "mxfp4"):
        raise ConfigError(
            f"--quantization {value}: the weights are quantized when they are loaded, by "
            "quantization=fp8, int8, int4 or mxfp4; folders in fp8 and mxfp4 are recognised by "
            "themselves"
        )
    return [f"quantization={value}"]


def kv_cache_overrides(value: str) -> list[str]:
    if value not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {value}: the cache has the dtype of the model or, with "
            "quantize_kvcache=true, kv_quant_dtype=int8, int4 or fp8"
        )
    return KV_CACHE_DTYPES[value]


SPECULATIVE_KEYS = {
    "model": "speculative_model_path",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "prompt_lookup_max",
    "prompt_lookup_min": "prompt_lookup_min",
    "disable_by_batch_size": "speculative_disable_by_batch_size",
}


def speculative_overrides(value: str) -> list[str]:
    flag = "--speculative-config"
    try:
        settings = json.loads(value)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f'{flag} takes a JSON object, such as {{"method": "ngram"}}')
    method = settings.pop("method", "draft_model")
    if method == "ngram":
        settings.pop("model", None)
    for name, entry in settings.items():
        if name not in SPECULATIVE_KEYS:
            known = ", ".join(["method", *SPECULATIVE_KEYS])
            raise ConfigError(f"{flag} has no entry {str(name)[:60]!r} here: it takes {known}")
        if not isinstance(entry, str | int) or isinstance(entry, bool):
            raise ConfigError(f"{flag}: {name} must be a number or a text")
    keys = {SPECULATIVE_KEYS[name]: entry for name, entry in settings.items()}
    if str(method).endswith("_mtp"):  # vLLM also names the family
        method = "mtp"
    keys["speculative_method"] = "draft" if method == "draft_model" else str(method)
    return [f"{key}={entry}" for key, entry in keys.items()]


# vLLM's flag -> our key, with the same values
KEYS = {
    "--max-model-len": "max_target_length",
    "--max-num-seqs": "per_device_batch_size",
    "--max-num-batched-tokens": "prefill_chunk_size",
    "--tensor-parallel-size": "ici_tensor_parallelism",
    "--data-parallel-size": "ici_data_parallelism",
    "--chat-template": "chat_template_path",
    "--tokenizer": "tokenizer_path",
    "--hf-token": "hf_access_token",
    "--block-size": "pagedattn_tokens_per_page",
    "--num-gpu-blocks-override": "pagedattn_num_pages",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--max-loras": "max_adapters",
    "--model": "load_parameters_path",
}
ALIASES = {"--tensor-parallel-size": ("-tp",), "--data-parallel-size": ("-dp",)}
TRANSLATED = (
    Option("--dtype", "D", overrides=dtype_overrides),
    Option("--quantization", "Q", overrides=quantization_overrides, aliases=("-q",)),
    Option("--kv-cache-dtype", "D", overrides=kv_cache_overrides),
    Option("--speculative-config", "JSON", overrides=speculative_overrides),
)
SWITCHES = {
    "--enable-prefix-caching": "enable_prefix_caching=true",
    "--no-enable-prefix-caching": "enable_prefix_caching=false",
    "--enable-chunked-prefill": "use_chunked_prefill=true",
    "--no-enable-chunked-prefill": "use_chunked_prefill=false",
}
# What they ask for is so without them
DEFAULTS = (
    "--enable-auto-tool-choice",
    "--enable-lora",
    "--disable-log-requests",
    "--no-enable-log-requests",
    "--disable-log-stats",
)
# vLLM's flag -> what to use instead
REFUSED = {
    "--swap-space": "the cache stays on the device: lower per_device_batch_size or "
    "max_target_length, or set quantize_kvcache=true",
    "--cpu-offload-gb": "weights stay on the device: quantization=fp8, int8 or int4 shrinks them",
    "--enforce-eager": "all programs are compiled, and jax_cache_dir keeps them for the next start",
    "--trust-remote-code": "the code of a model folder is never run: the families of `maxtext "
    "models` are built in",
    "--seed": "a request has a seed of its own",
    "--download-dir": "the environment variable HF_HOME names the cache of the Hugging Face Hub",
    "--revision": "write the model as org/name@revision",
    "--tokenizer-revision": "name the tokenizer's folder by tokenizer_path=DIR",
    "--max-lora-rank": "every adapter keeps its own rank",
    "--pipeline-parallel-size": "pipelines do not serve: use ici_tensor_parallelism",
    "--enable-expert-parallel": "set ici_expert_parallelism to the number of devices",
    "--load-format": "folders of safetensors and our checkpoints are recognised by themselves",
    "--guided-decoding-backend": "grammars have one implementation, llguidance",
    "--allowed-origins": "use --cors ORIGIN ...",
    "--uvicorn-log-level": "use --log-requests for a line for each request",
    "--config": "name the YAML file with keys as an argument: maxtext serve MODEL my.yml",
}
VLLM = (
    *(
        Option(flag, "VALUE", type=ANY_TEXT, overrides=key, aliases=ALIASES.get(flag, ()))
        for flag, key in KEYS.items()
    ),
    *TRANSLATED,
    *(Option(flag, overrides=setting) for flag, setting in SWITCHES.items()),
    *(Option(flag) for flag in DEFAULTS),
    *(Option(flag, refusal=reason) for flag, reason in REFUSED.items()),
)
