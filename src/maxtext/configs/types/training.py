"""The training loop, optimizers, and fine-tuning methods."""

import re
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from maxtext.configs.types.enums import LearningRateScheduleType, OptimizerType, WsdDecayStyle
from maxtext.configs.types.group import Group, acts_only, in_range, rule


class TrainingLoop(Group):
    """How long to train, when to evaluate or stop, and random seeds."""

    steps: int = 150001
    log_period: int = 100
    eval_interval: int = -1
    eval_steps: int = -1
    target_eval_loss: float = 0.0
    abort_on_nan_loss: bool = True
    abort_on_inf_loss: bool = True
    enable_dropout: bool = True
    dropout_rate: float = 0.0
    enable_data_shuffling: bool = True
    data_shuffle_seed: int = 0
    init_weights_seed: int = 0


class Optimizer(Group):
    """Update rule, learning-rate schedule, clipping, accumulation and spike protection."""

    opt_type: OptimizerType = OptimizerType.ADAMW
    skip_step_on_spikes: bool = False
    skip_step_interval: PositiveInt = 128
    skip_step_scaling_factor: float = 6.0
    gradient_accumulation_steps: PositiveInt = 1
    use_tunix_gradient_accumulation: bool = False
    gradient_clipping_threshold: NonNegativeFloat = 1.0
    learning_rate: NonNegativeFloat = 3e-05
    lr_schedule_type: LearningRateScheduleType = LearningRateScheduleType.COSINE
    learning_rate_final_fraction: float = 0.1
    wsd_decay_steps_fraction: float = 0.1
    wsd_decay_style: WsdDecayStyle = WsdDecayStyle.LINEAR
    warmup_steps_fraction: float = 0.1
    learning_rate_schedule_steps: int = -1
    trainable_parameters_mask: list[str] = Field(default_factory=list)


class AdamW(Group):
    """Moments, stabilizers and weight decay of the Adam-type optimizers."""

    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-08
    adam_eps_root: float = 0.0
    adam_weight_decay: float = 0.1
    adamw_mask: list[str] = Field(default_factory=list)
    mu_dtype: str = ""


class Muon(Group):
    """Momentum, decay and update scale of the Muon optimizer."""

    muon_beta: float = 0.95
    muon_weight_decay: float = 0
    muon_consistent_rms: float | None = None


class FineTuning(Group):
    """Post-training method to use, and the settings of its loss."""

    use_dpo: bool = False
    dpo_label_smoothing: float = 0.0
    dpo_beta: float = 0.1
    use_sft: bool = False
    sft_train_on_completion_only: bool = False
    formatting_func_path: str = ""
    formatting_func_kwargs: dict = Field(default_factory=dict)
    use_grpo: None | bool = None


class Distillation(Group):
    """How a student model learns from a teacher's outputs and weights."""

    student_overrides: dict[str, Any] = Field(default_factory=dict)
    teacher_overrides: dict[str, Any] = Field(default_factory=dict)
    offline_data_dir: str | None = None
    distill_alpha: float = 0.5
    distill_temperature: float = 1.0
    distill_beta: float = 0.0
    distill_feature_loss_type: Literal["cosine", "l2"] = "cosine"
    distill_layer_indices: None | list = None
    distill_alpha_end: float | None = None
    distill_alpha_schedule: Literal["constant", "linear", "cosine"] = "constant"
    distill_temperature_end: float | None = None
    distill_temperature_schedule: Literal["constant", "linear", "cosine"] = "constant"
    distill_beta_end: float | None = None
    distill_beta_schedule: Literal["constant", "linear", "cosine"] = "constant"
    learn_to_init_mode: bool = False
    lti_use_general_linear_map: bool = False
    distill_weights_copy_map: dict[str, Any] = Field(default_factory=dict)
    distill_student_weights_share_map: dict[str, Any] = Field(default_factory=dict)
    student_params_to_update: None | list = None


in_range(1, None, "steps", "log_period", "skip_step_scaling_factor")
in_range(1, None, "eval_interval", "eval_steps", "learning_rate_schedule_steps", special=(-1,))
in_range(0, 1, "learning_rate_final_fraction", "warmup_steps_fraction", "wsd_decay_steps_fraction")
in_range(
    0,
    1,
    "adam_b1",
    "adam_b2",
    "muon_beta",
    "distill_alpha",
    "distill_alpha_end",
    "dpo_label_smoothing",
)
in_range(
    0,
    None,
    "adam_eps",
    "adam_eps_root",
    "adam_weight_decay",
    "muon_weight_decay",
    "dpo_beta",
    "distill_beta",
)
in_range(0, None, "target_eval_loss", "data_shuffle_seed", "init_weights_seed")
in_range(0, 0.99, "dropout_rate")

acts_only(lambda c: c.eval_interval > 0, "eval_interval", "eval_steps", "target_eval_loss")


@rule
def warmup_and_decay_fit_in_the_schedule(c):
    if (
        c.lr_schedule_type.value == "wsd"
        and c.warmup_steps_fraction + c.wsd_decay_steps_fraction > 1
    ):
        return "warmup_steps_fraction + wsd_decay_steps_fraction is above 1: the two phases overlap"
    return None


@rule
def mu_dtype_is_a_float(c):
    if c.mu_dtype not in ("", "float32", "bfloat16", "float16"):
        return f"mu_dtype={c.mu_dtype!r} is not known: use float32, bfloat16, float16, or empty for the weights' own"
    return None


@rule
def one_fine_tuning_method(c):
    chosen = [key for key in ("use_dpo", "use_sft", "use_grpo") if getattr(c, key)]
    return f"{' and '.join(chosen)} exclude each other: keep one" if len(chosen) > 1 else None


@rule
def temperature_is_positive(c):
    if c.distill_temperature <= 0 or (
        c.distill_temperature_end is not None and c.distill_temperature_end <= 0
    ):
        return "distill_temperature and distill_temperature_end must be above 0"
    return None


@rule
def patterns_are_regular_expressions(c):
    for key in ("adamw_mask", "trainable_parameters_mask"):
        for pattern in getattr(c, key):
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{key}: {pattern!r} is not a regular expression ({error})"
    return None
