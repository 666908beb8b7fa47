"""The training loop, optimizers, and fine-tuning methods."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from maxtext.configs.types.enums import LearningRateScheduleType, OptimizerType, WsdDecayStyle
from maxtext.configs.types.group import Group


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


class Preferences(Group):
    """Preference optimization beyond the published keys: loss, lengths and reference."""

    dpo_loss_type: Literal[
        "sigmoid", "hinge", "ipo", "robust", "simpo", "kto", "apo_zero", "apo_down", "orpo"
    ] = "sigmoid"
    orpo_lambda: float = 0.1
    simpo_gamma: float = 0.5
    max_prompt_length: int | None = None
    precompute_reference_logps: bool = False


class Adapters(Group):
    """Low-rank adapters: which layers have them, how they start, and the format of the base."""

    enable_lora: bool | None = None
    lora_rank: NonNegativeInt = 0
    lora_alpha: float = 0.0
    lora_module_path: str = ""
    lora_target_modules: str | list[str] | None = None
    lora_dropout: float = 0.0
    lora_use_rslora: bool = False
    lora_use_dora: bool = False
    lora_init: Literal["kaiming", "gaussian"] = "kaiming"
    lora_weight_qtype: Literal["int8", "int4", "nf4"] | None = None
    lora_tile_size: int = 64
    lora_restore_path: str = ""
    max_adapters: int = 8


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


class GeneralizedDistillation(Group):
    """GKD: a divergence from the teacher, on completions that the student samples."""

    use_gkd: bool = False
    gkd_lambda: float = 0.5
    gkd_beta: float = 0.5
    gkd_max_new_tokens: PositiveInt = 128
    gkd_seq_kd: bool = False
