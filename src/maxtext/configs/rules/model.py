"""Rules of the model keys."""

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings

# remat_policy=custom can save only tensors that the model has.


@rule("base_num_query_heads")
def heads_divide_evenly(settings: Settings) -> str | None:
    if settings.base_num_query_heads % settings.base_num_kv_heads:
        return (
            f"base_num_query_heads={settings.base_num_query_heads} is not a multiple of "
            f"base_num_kv_heads={settings.base_num_kv_heads}: every key/value head must serve the "
            "same number of query heads"
        )
    return None


@rule("global_parameter_scale")
def scale_is_a_power_of_two(settings: Settings) -> str | None:
    scale = settings.global_parameter_scale
    if scale < 1 or scale & (scale - 1):
        return f"global_parameter_scale={scale} is not a power of two: use 1, 2, 4, 8, …"
    return None


@rule("mlp_activations")
def mlp_has_one_or_two_activations(settings: Settings) -> str | None:
    if not 1 <= len(settings.mlp_activations) <= 2:
        return "mlp_activations takes one name, or two for a gated MLP such as [silu, linear]"
    return None


@rule("mlp_activations_limit")
def activation_limit_needs_a_gated_mlp(settings: Settings) -> str | None:
    limit = settings.mlp_activations_limit
    if limit <= 0 and limit != -1:
        return f"mlp_activations_limit={limit:g} is out of range: it must be above 0, or -1"
    if limit > 0 and len(settings.mlp_activations) != 2:
        return (
            f"mlp_activations_limit={limit:g} clips the gate and the linear branch of a gated MLP: "
            "mlp_activations must have two names"
        )
    return None


@rule("weight_sparsity_n")
def sparsity_keeps_n_of_m(settings: Settings) -> str | None:
    n, m = settings.weight_sparsity_n, settings.weight_sparsity_m
    if (n is None) != (m is None):
        return "weight_sparsity_n and weight_sparsity_m go together: set both or neither"
    if n is not None and m is not None and n >= m:
        return (
            f"weight_sparsity_n={n} must be below weight_sparsity_m={m}: n of every m weights are "
            "kept"
        )
    return None


@rule("quantization")
def quantization_is_implemented(settings: Settings) -> str | None:
    if settings.quantization and settings.quantization.value not in (
        "int8",
        "int4",
        "fp8",
        "fp8_gpu",
        "fp8_full",
    ):
        return (
            f"quantization={settings.quantization.value} is not implemented: use int8, fp8 or "
            "fp8_full for training, int8 or int4 for weight-only quantization in inference"
        )
    return None


@rule("quantization")
def fp8_full_needs_an_output_head(settings: Settings) -> str | None:
    if (
        settings.quantization
        and settings.quantization.value == "fp8_full"
        and settings.logits_via_embedding
    ):
        return (
            "quantization=fp8_full quantizes the output head, and logits_via_embedding=true "
            "leaves none: use fp8"
        )
    return None


@rule("kv_quant_axis")
def quantized_cache_has_an_axis(settings: Settings) -> str | None:
    if settings.quantize_kvcache and not settings.kv_quant_axis.value:
        return "quantize_kvcache=true needs kv_quant_axis: dkv or heads_and_dkv"
    return None


@rule("mtp_eval_target_module")
def mtp_evaluates_a_module_that_exists(settings: Settings) -> str | None:
    if settings.mtp_eval_target_module > settings.mtp_num_layers:
        return (
            f"mtp_eval_target_module={settings.mtp_eval_target_module} is above "
            f"mtp_num_layers={settings.mtp_num_layers}"
        )
    return None


@rule("engram_vocab_bases")
def engram_has_a_vocabulary_for_each_order(settings: Settings) -> str | None:
    if (
        settings.engram_layers
        and len(settings.engram_vocab_bases) != settings.engram_max_ngram_size - 1
    ):
        return (
            "engram_vocab_bases needs one size for each n-gram order "
            f"2..{settings.engram_max_ngram_size}, and has {len(settings.engram_vocab_bases)}"
        )
    return None
