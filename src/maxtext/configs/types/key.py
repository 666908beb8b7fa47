"""The declaration of a key: its default, meaning, bounds, what it needs, and whether it acts.

base.yml, the checks of bounds and needs, the ledger and `maxtext config explain` follow from it.
A `Need` is a condition of the settings, for a key that needs more than one other key to be set.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from maxtext.common.types import Json
from maxtext.configs.types.enums import DatasetType, ShardMode

if TYPE_CHECKING:
    from maxtext.configs.types import Settings

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True)
class Status:
    """`kind`: acts, computed, not_yet or never."""

    kind: str
    reason: str = ""

    def __str__(self) -> str:
        text = {
            "acts": "acts",
            "computed": "computed",
            "not_yet": "does not act yet",
            "never": "does not act here",
        }[self.kind]
        return f"{text}: {self.reason}" if self.reason else text


ACTS = Status("acts")


@dataclass(frozen=True)
class Need:
    """A key does nothing while `condition` is false; `requirement` says in words what it asks."""

    condition: Callable[["Settings"], object]
    requirement: str


@dataclass(frozen=True)
class Declaration:
    meaning: str
    low: float | None = None  # None: no bound
    high: float | None = None
    special: tuple[float, ...] = ()  # values outside of the bounds
    limit: int = INT32_MAX  # largest magnitude of its whole numbers
    choices: tuple[str, ...] = ()  # of a text
    is_path: bool = False  # of this machine
    # A key that must be set, or what else is required, in the order of the checks
    needs: tuple[str | Need, ...] = ()
    status: Status = ACTS
    accepts: object = None  # of a key that does not act: a value that describes what happens anyway
    base: object = None  # its value in base.yml, if that is not the default of its type

    @property
    def bounds(self) -> str:
        """Such as "at least 1, or -1"; empty: none."""
        if self.low is None and self.high is None:
            return ""
        text = f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"
        return text + "".join(f", or {number}" for number in self.special)


def key(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    special: Iterable[float] = (),
    limit: int = INT32_MAX,
    choices: Iterable[str] = (),
    is_path: bool = False,
    needs: str | Need | Iterable[str | Need] = (),
    status: Status = ACTS,
    accepts: object = None,
    base: object = None,
) -> Any:
    """A field of a group, as `Declaration` describes it. The default `list` or `dict` is empty."""
    declaration = Declaration(
        meaning=meaning,
        low=low,
        high=high,
        special=tuple(special),
        limit=limit,
        choices=tuple(choices),
        is_path=is_path,
        needs=(needs,) if isinstance(needs, str | Need) else tuple(needs),
        status=status,
        accepts=accepts,
        base=base,
    )
    extra: Json = {"declaration": declaration}
    if default is list or default is dict:
        return Field(default_factory=default, json_schema_extra=extra)
    return Field(default=default, json_schema_extra=extra)


def declaration_of(field: FieldInfo) -> Declaration:
    extra: Any = field.json_schema_extra
    assert isinstance(extra, Mapping), "every key is declared by `key`"
    return extra["declaration"]


SMOOTHED_LOSSES = ("sigmoid", "robust", "simpo", "orpo")


def uses_mla(settings: "Settings") -> bool:
    return settings.attention_type == "mla"


def saves_custom_tensors(settings: "Settings") -> bool:
    return settings.remat_policy == "custom"


def distills(settings: "Settings") -> bool:
    """Whether the model learns from a teacher."""
    return bool(settings.teacher_overrides or settings.offline_data_dir)


def samples_completions(settings: "Settings") -> bool:
    """Whether training samples completions, from the student or from its teacher."""
    return settings.use_gkd and (settings.gkd_lambda > 0 or settings.gkd_seq_kd)


def rope_is_scaled(settings: "Settings") -> bool:
    return settings.rope_type.value == "yarn" or (
        settings.rope_type.value == "llama3.1" and settings.rope_use_scale
    )


MLA = Need(uses_mla, "attention_type=mla")
INDEXER_LOSS = Need(
    lambda s: s.use_indexer and s.indexer_loss_scaling_factor > 0,
    "use_indexer=true and indexer_loss_scaling_factor",
)
CUSTOM_REMAT_MLA = Need(
    lambda s: saves_custom_tensors(s) and uses_mla(s), "remat_policy=custom and attention_type=mla"
)
CUSTOM_REMAT_NAIVE_MLA = Need(
    lambda s: saves_custom_tensors(s) and uses_mla(s) and s.mla_naive_kvcache,
    "remat_policy=custom, attention_type=mla and mla_naive_kvcache=true",
)
CUSTOM_REMAT_Q_LORA = Need(
    lambda s: saves_custom_tensors(s) and uses_mla(s) and s.q_lora_rank > 0,
    "remat_policy=custom, attention_type=mla and q_lora_rank",
)
CHECKPOINT_TO_READ = Need(
    lambda s: s.load_parameters_path or s.load_full_state_path,
    "a checkpoint to read: set load_parameters_path or load_full_state_path",
)
EXPIRING_CHECKPOINTS = Need(
    lambda s: s.max_num_checkpoints_to_keep,
    "max_num_checkpoints_to_keep: without it nothing is deleted",
)
LOCAL_CHECKPOINTS = Need(
    lambda s: s.enable_emergency_checkpoint or s.enable_multi_tier_checkpointing,
    "enable_emergency_checkpoint=true or enable_multi_tier_checkpointing=true",
)
PACKED_HERE = Need(
    lambda s: s.dataset_type not in (DatasetType.C4MLPERF, DatasetType.OLMO_GRAIN),
    "a dataset_type other than c4_mlperf and olmo_grain, which pack rows in their own way",
)
UNTOKENIZED_DATA = Need(
    lambda s: s.dataset_type is not DatasetType.OLMO_GRAIN,
    "a dataset_type other than olmo_grain, whose data is already tokenized",
)
A_TEACHER = Need(distills, "a teacher: set teacher_overrides")
RUNNING_TEACHER = Need(lambda s: s.teacher_overrides, "a teacher that runs: set teacher_overrides")
NO_GKD = Need(
    lambda s: not s.use_gkd, "use_gkd=false, since the divergence is the only loss of GKD"
)
SAMPLED_COMPLETIONS = Need(samples_completions, "use_gkd=true and gkd_lambda above 0")
NO_TEACHER = Need(
    lambda s: not distills(s),
    "training without a teacher: distillation has no loss of the MTP layers",
)
FEATURE_LOSS = Need(lambda s: s.distill_beta > 0, "distill_beta above 0")
FINE_TUNING_OR_TEACHER = Need(
    lambda s: s.use_sft or s.use_dpo or s.num_labels or distills(s),
    "use_sft, use_dpo, num_labels or a teacher (trainable_parameters_mask acts in every training)",
)
FINE_TUNING = Need(
    lambda s: s.use_sft or s.use_dpo or s.use_grpo or s.num_labels,
    "use_sft, use_dpo, use_grpo or num_labels",
)
REWARD_MODEL = Need(lambda s: s.num_labels, "num_labels=1")
PAIRS = Need(lambda s: s.use_dpo or s.num_labels, "use_dpo=true or num_labels=1")
NOT_ORPO = Need(
    lambda s: s.dpo_loss_type != "orpo",
    "a dpo_loss_type other than orpo, whose weight is orpo_lambda",
)
SMOOTHED_LOSS = Need(
    lambda s: s.dpo_loss_type in SMOOTHED_LOSSES, "dpo_loss_type=sigmoid, robust, simpo, orpo"
)
REFERENCE = Need(
    lambda s: s.dpo_loss_type not in ("orpo", "simpo"),
    "a dpo_loss_type with a reference: orpo and simpo have none",
)
NO_PREFERENCES = Need(
    lambda s: not (s.use_dpo or s.num_labels),
    "a loss of next tokens: losses of use_dpo compare completions, as do those of num_labels",
)
NGRAM_DRAFTS = Need(lambda s: s.speculative_method == "ngram", "speculative_method=ngram")
DRAFT_MODEL = Need(
    lambda s: s.speculative_method in ("draft", "eagle3"), "speculative_method=draft or eagle3"
)
ORPO = Need(lambda s: s.dpo_loss_type == "orpo", "dpo_loss_type=orpo")
SIMPO = Need(lambda s: s.dpo_loss_type == "simpo", "dpo_loss_type=simpo")
ADAPTERS = Need(lambda s: s.lora_rank or s.lora_restore_path, "lora_rank or lora_restore_path")
LORA_IF_ENABLED = Need(
    lambda s: not s.enable_lora or s.lora_rank or s.lora_restore_path,
    "lora_rank or lora_restore_path",
)
NEW_ADAPTERS = Need(
    lambda s: s.lora_rank and not s.lora_restore_path, "lora_rank, without lora_restore_path"
)
FOUR_BIT_BASE = Need(
    lambda s: s.lora_weight_qtype in ("int4", "nf4"), "lora_weight_qtype=int4 or nf4"
)
TRAINED_WEIGHTS = Need(
    lambda s: not (s.lora_rank or s.lora_restore_path),
    "training of the weights that it changes: adapters leave them frozen",
)
PAGED_ATTENTION = Need(lambda s: s.attention == "paged", "attention=paged")
PAGED_OR_PREFIX_CACHE = Need(
    lambda s: s.attention == "paged" or s.enable_prefix_caching,
    "attention=paged or enable_prefix_caching=true",
)
MTP_LAYERS = Need(lambda s: s.mtp_num_layers > 0, "mtp_num_layers")
EVALUATION = Need(lambda s: s.eval_interval > 0, "eval_interval")
HYPER_CONNECTIONS = Need(lambda s: s.mhc_expansion_rate > 1, "mhc_expansion_rate above 1")
ENGRAM_LAYERS = Need(lambda s: bool(s.engram_layers), "engram_layers")
CUSTOM_REMAT_ENGRAM = Need(
    lambda s: saves_custom_tensors(s) and bool(s.engram_layers),
    "remat_policy=custom and engram_layers",
)
QUANTIZED_WEIGHTS = Need(
    lambda s: s.quantization and s.quantization.value in ("fp8", "int8", "int4", "mxfp4"),
    "quantization=fp8, int8, int4 or mxfp4",
)
CUSTOM_REMAT = Need(lambda s: s.remat_policy == "custom", "remat_policy=custom")
EXPLICIT_SHARDING = Need(lambda s: s.shard_mode is ShardMode.EXPLICIT, "shard_mode=explicit")
SCALED_ROPE = Need(
    lambda s: (
        rope_is_scaled(s)
        or (s.rope_type.value == "llama3.1" and s.source("rope_use_scale").is_user)
    ),
    "rope_type=yarn, or llama3.1 with rope_use_scale=true",
)
KL = Need(lambda s: s.grpo_beta > 0, "grpo_beta above 0: there is no KL otherwise")
SAMPLER_CORRECTION = Need(lambda s: s.sampler_correction != "none", "sampler_correction")
REWARD_FUNCTIONS = Need(lambda s: s.reward_functions_path != "", "reward_functions_path")
NO_ADVANTAGES = Need(
    lambda s: not s.use_grpo, "a loss of next tokens: that of use_grpo has advantages"
)
ROWS_OF_DATA = Need(
    lambda s: not s.use_grpo, "rows of data: a step of use_grpo has batch_size prompts"
)
OTHER_THAN_ROLLOUTS = Need(
    lambda s: not s.use_grpo, "requests: hbm_utilization_vllm limits the caches of rollouts"
)
RL_EVALUATION = Need(
    lambda s: s.use_grpo and s.num_test_batches, "use_grpo=true and num_test_batches"
)
LOSS_OF_EVALUATION = Need(
    lambda s: not s.use_grpo, "a loss of evaluation data: use_grpo samples responses instead"
)


class Group(BaseModel):
    """A group of keys: frozen, and unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        # a group is rarely instantiated by itself, and building 75 validators takes time
        defer_build=True,
    )
