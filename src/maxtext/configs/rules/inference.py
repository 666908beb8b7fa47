"""Rules of the inference keys."""

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings


@rule("max_prefill_predict_length")
def prompts_fit_in_the_sequence(settings: Settings) -> str | None:
    if (
        settings.source("use_chunked_prefill").is_user
        and settings.use_chunked_prefill
        and settings.max_prefill_predict_length > settings.max_target_length
    ):
        return (
            f"max_prefill_predict_length={settings.max_prefill_predict_length} is above "
            f"max_target_length={settings.max_target_length}: the prompt is part of the sequence"
        )
    return None


@rule("decode_sampling_strategy")
def sampling_strategy_has_its_parameter(settings: Settings) -> str | None:
    strategy = settings.decode_sampling_strategy.value
    if strategy == "nucleus" and settings.decode_sampling_nucleus_p <= 0:
        return "decode_sampling_strategy=nucleus needs decode_sampling_nucleus_p, e.g. 0.95"
    if strategy == "topk" and settings.decode_sampling_top_k < 1:
        return "decode_sampling_strategy=topk needs decode_sampling_top_k, e.g. 50"
    if strategy == "composite" and (
        settings.decode_sampling_nucleus_p <= 0 or settings.decode_sampling_top_k < 1
    ):
        return (
            "decode_sampling_strategy=composite needs decode_sampling_top_k and "
            "decode_sampling_nucleus_p"
        )
    return None


@rule("prefill_cache_axis_order")
def axis_orders_are_permutations(settings: Settings) -> str | None:
    for key in ("prefill_cache_axis_order", "ar_cache_axis_order", "compute_axis_order"):
        if sorted(getattr(settings, key).replace(" ", "").split(",")) != ["0", "1", "2", "3"]:
            return f"{key}={getattr(settings, key)!r} is not a permutation of the axes 0,1,2,3"
    return None


@rule("inference_microbenchmark_stages")
def benchmark_stages_are_known(settings: Settings) -> str | None:
    unknown = set(settings.inference_microbenchmark_stages.replace(" ", "").split(",")) - {
        "prefill",
        "generate",
    }
    if unknown:
        return (
            f"inference_microbenchmark_stages has unknown stages {', '.join(sorted(unknown))}: use "
            "prefill,generate"
        )
    return None
