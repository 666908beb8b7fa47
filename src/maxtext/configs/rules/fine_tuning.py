"""Rules of supervised fine-tuning and preference optimization."""

from maxtext.configs.rules.rule import derived_rule, rule
from maxtext.configs.types import MaxTextConfig, Settings
from maxtext.configs.types.enums import DatasetType

METHOD_KEYS = ("use_dpo", "use_sft", "use_grpo", "num_labels")


def method_of(settings: Settings) -> str | None:
    """The key that makes records rows of fine-tuning, or None."""
    return next((key for key in METHOD_KEYS if getattr(settings, key)), None)


@rule("num_labels")
def head_has_one_score(settings: Settings) -> str | None:
    if settings.num_labels > 1:
        return (
            f"num_labels={settings.num_labels} is a classifier, and only reward models, which have "
            "num_labels=1, are supported"
        )
    if settings.num_labels and (settings.teacher_overrides or settings.offline_data_dir):
        return "num_labels=1 is a reward model, which has no logits to distill: leave it out"
    return None


@rule("use_dpo")
def one_fine_tuning_method(settings: Settings) -> str | None:
    chosen = [key for key in METHOD_KEYS if getattr(settings, key)]
    return f"{' and '.join(chosen)} exclude each other: keep one" if len(chosen) > 1 else None


@rule("dpo_label_smoothing")
def flipped_labels_are_fewer_than_half(settings: Settings) -> str | None:
    if settings.dpo_loss_type == "robust" and settings.dpo_label_smoothing >= 0.5:
        return (
            f"dpo_label_smoothing={settings.dpo_label_smoothing} is the part of labels that are "
            "flipped, and dpo_loss_type=robust needs it below 0.5"
        )
    return None


@rule("dpo_loss_type")
def kl_is_of_a_batch(settings: Settings) -> str | None:
    microbatches = settings.gradient_accumulation_steps
    if settings.use_dpo and settings.dpo_loss_type == "kto" and microbatches > 1:
        return (
            "dpo_loss_type=kto estimates a KL divergence from all pairs of a batch, and "
            f"gradient_accumulation_steps={microbatches} computes only a part of them at a time: "
            "set gradient_accumulation_steps=1 or another dpo_loss_type"
        )
    return None


@rule("quantization")
def adapters_multiply_in_floats(settings: Settings) -> str | None:
    has_adapters = settings.lora_rank > 0 or settings.lora_restore_path
    if has_adapters and settings.quantization is not None and settings.quantization.value:
        return (
            f"quantization={settings.quantization.value} would do nothing: a model with adapters "
            "multiplies in dtype; lora_weight_qtype quantizes its base"
        )
    return None


@derived_rule("lora_rank")
def rank_is_low(config: MaxTextConfig) -> str | None:
    if config.lora_rank > config.emb_dim:
        return (
            f"lora_rank={config.lora_rank} is above emb_dim={config.emb_dim}, the rank of a full "
            "update: lower it"
        )
    return None


@rule("dataset_type")
def rows_are_records(settings: Settings) -> str | None:
    method, kind = method_of(settings), settings.dataset_type
    if method and kind in (DatasetType.C4MLPERF, DatasetType.OLMO_GRAIN):
        return (
            f"dataset_type={kind.value} has no conversations or pairs for {method}: use grain, hf "
            "or tfds"
        )
    return None


@rule("tokenize_train_data")
def rows_are_text(settings: Settings) -> str | None:
    method = method_of(settings)
    for key in ("tokenize_train_data", "tokenize_eval_data"):
        if method and not getattr(settings, key):
            return f"{method} tokenizes conversations and texts itself: leave {key}=true"
    return None


@rule("use_truncation")
def rows_are_not_split(settings: Settings) -> str | None:
    method = method_of(settings)
    if method and not settings.use_truncation:
        return (
            f"use_truncation=false splits documents, but {method} keeps rows whole: leave it true "
            "and raise max_target_length"
        )
    return None


@rule("packing")
def pairs_are_not_packed(settings: Settings) -> str | None:
    for key in ("use_dpo", "num_labels"):
        if getattr(settings, key) and settings.packing:
            return f"a preference pair is a row of its own: set packing=false with {key}"
    return None


@rule("grain_packing_type")
def conversations_are_not_split(settings: Settings) -> str | None:
    if settings.use_sft and settings.packing and settings.grain_packing_type == "concat_then_split":
        return (
            "grain_packing_type=concat_then_split splits conversations where rows end: use "
            "first_fit or best_fit with use_sft"
        )
    return None


@rule("max_prompt_length")
def prompts_leave_room_for_a_response(settings: Settings) -> str | None:
    length = settings.max_prompt_length
    if length is not None and length > settings.max_target_length:
        return (
            f"max_prompt_length={length} leaves no token of max_target_length="
            f"{settings.max_target_length} for a completion: lower it"
        )
    return None
