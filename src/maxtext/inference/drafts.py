"""The proposer of drafted tokens for a model, by the speculative_* keys.

`load_drafts` checks that the model can verify drafts, and loads a draft model, before the weights
of the model itself are loaded.
"""

import jax

from maxtext.checkpoint.open import Checkpoint, open_checkpoint
from maxtext.common.errors import ConfigError, as_config_error
from maxtext.common.hub import find_folder
from maxtext.configs import types
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.serialize import plain
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.eagle import load_eagle_head
from maxtext.inference.engine.draft_heads import MtpProposer
from maxtext.inference.engine.drafting import DraftModelProposer, NgramProposer, Proposer
from maxtext.inference.engine.model import InferenceModel
from maxtext.inference.loading import inference_context, load_weights, resolve_config
from maxtext.layers.cache import CacheConfig, RecurrentState
from maxtext.layers.context import BuildContext
from maxtext.layers.specs import AttentionSpec, MlaSpec
from maxtext.models.transformer import empty_caches, make_template, mtp_block
from maxtext.sharding import AxisRules
from maxtext.tokenizers import find_tokenizer

# Keys that a draft model has from the model itself, if the user sets them.
SHARED_KEYS = (
    *types.IciParallelism.model_fields,
    *types.DcnParallelism.model_fields,
    "logical_axis_rules",
    "hardware",
    "dtype",
    "weight_dtype",
    "matmul_precision",
    "attention",
    "per_device_batch_size",
    "hf_access_token",
)


def load_drafts(
    config: MaxTextConfig,
    context: BuildContext,
    rules: AxisRules,
    checkpoint: Checkpoint | None = None,
) -> Proposer | None:
    """The proposer that the keys ask for; None if they ask for none. `checkpoint` is that of the
    model. Raises ConfigError if the model cannot verify drafts, or if the draft model has other
    tokens."""
    method = config.speculative_method
    if not method:
        return None
    if (reason := drafts_unsupported_reason(config, context)) is not None:
        raise ConfigError(
            f"speculative_method={method} does not fit this model: {reason}; leave it out"
        )
    if method == "draft":
        return load_draft_model(config, rules, checkpoint)
    if method == "mtp":
        return mtp_proposer(config)
    if method == "eagle3":
        return load_eagle_head(config, rules, shared_keys(config))
    return NgramProposer(
        config.num_speculative_tokens,
        max_length=config.prompt_lookup_max,
        min_length=config.prompt_lookup_min,
    )


def drafts_unsupported_reason(
    config: MaxTextConfig, context: BuildContext, is_draft_model: bool = False
) -> str | None:
    """Why a model cannot verify drafts, or draft, token by token; None if it can."""
    longest = CacheConfig(1, config.max_target_length, config.dtype.value, context=context)
    caches = jax.eval_shape(lambda: empty_caches(config, longest))
    if caches is None:
        return "some layer has no cache, so that a step computes one token only"
    if is_draft_model and any(isinstance(cache, RecurrentState) for cache in caches):
        return "its recurrent layers cannot drop several rejected tokens, one step each"
    return None


def mtp_proposer(config: MaxTextConfig) -> MtpProposer:
    reason = None
    if not config.mtp_num_layers:
        reason = "which this model does not have"
    elif not isinstance(mtp_block(config).attention, AttentionSpec | MlaSpec):
        reason = "which is recurrent in this model"
    if reason is not None:
        raise ConfigError(
            f"speculative_method=mtp drafts with a multi-token prediction layer, {reason}: use "
            "ngram or draft"
        )
    return MtpProposer(config.num_speculative_tokens, config=config)


def load_draft_model(
    config: MaxTextConfig, rules: AxisRules, target: Checkpoint | None
) -> DraftModelProposer:
    path = config.speculative_model_path
    with as_config_error():
        checkpoint = open_checkpoint(find_folder(path, config.hf_access_token))
    draft_config = resolve_config(shared_keys(config), checkpoint)
    check_same_tokens(config, draft_config, target, checkpoint)
    context = inference_context(draft_config, rules)
    if (reason := drafts_unsupported_reason(draft_config, context, True)) is not None:
        raise ConfigError(f"speculative_model_path={path} cannot draft: {reason}")
    template = make_template(draft_config)
    weights, _ = load_weights(draft_config, template, rules, checkpoint, None)
    model = InferenceModel(draft_config, rules, context, template, weights)
    return DraftModelProposer(
        config.num_speculative_tokens,
        model_runner=model.programs.runner,
        weights=model.weights,
    )


def shared_keys(config: MaxTextConfig) -> Layer:
    """The settings that a draft model has from the model itself: its sequences are as long."""
    shared = {
        key: Setting(plain(getattr(config, key)), config.source(key))
        for key in SHARED_KEYS
        if config.source(key).is_user
    }
    length = Setting(config.max_target_length, Source("derived", "the model"))
    return shared | {"max_target_length": length}


def check_same_tokens(
    config: MaxTextConfig,
    draft_config: MaxTextConfig,
    target: Checkpoint | None,
    draft: Checkpoint,
) -> None:
    """Raise ConfigError if the two models give token ids different meanings."""
    path = config.speculative_model_path
    if draft_config.vocab_size != config.vocab_size:
        raise ConfigError(
            f"speculative_model_path={path} has vocab_size={draft_config.vocab_size} and the model "
            f"{config.vocab_size}: choose a draft model with the tokenizer of the model"
        )
    tokenizer = None if target is None else find_tokenizer(target.hf_assets)
    other = find_tokenizer(draft.hf_assets)
    if tokenizer is None or other is None:
        return
    for token in range(min(tokenizer.vocab_size, other.vocab_size)):
        if tokenizer.id_to_token(token) != other.id_to_token(token):
            raise ConfigError(
                f"speculative_model_path={path} has another tokenizer: token {token} is "
                f"{other.id_to_token(token)!r} there and {tokenizer.id_to_token(token)!r} in the "
                "model; choose a draft model with the tokenizer of the model"
            )
