"""Keys of training: the loop, optimizers, supervised and preference fine-tuning, reward models and
adapters. Keys of reinforcement learning are in rl.py, those of distillation in distillation.py.
"""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from maxtext.configs.types import inert
from maxtext.configs.types.enums import LearningRateScheduleType, OptimizerType, WsdDecayStyle
from maxtext.configs.types.key import (
    ADAPTERS,
    EVALUATION,
    FINE_TUNING,
    FOUR_BIT_BASE,
    INT64_MAX,
    LORA_IF_ENABLED,
    LOSS_OF_EVALUATION,
    NEW_ADAPTERS,
    NOT_ORPO,
    ORPO,
    PAIRS,
    REFERENCE,
    REWARD_MODEL,
    SIMPO,
    SMOOTHED_LOSS,
    Group,
    key,
)


class TrainingLoop(Group):
    """How long to train, when to evaluate or stop, and random seeds."""

    steps: int = key(
        150001,
        "Number of training steps, counted from the start of the run; -1 = "
        "learning_rate_schedule_steps. If fine-tuning sets neither, it runs for num_epoch epochs",
        low=1,
    )
    log_period: int = key(
        100,
        "Training steps between flushes of the metric writers, and between progress lines "
        "that stay on a terminal",
        low=1,
    )
    eval_interval: int = key(
        -1, "Training steps between two evaluations; -1 = never evaluate", low=1, special=(-1,)
    )
    eval_steps: int = key(
        -1,
        "Batches in one evaluation; -1 = the whole evaluation set",
        low=1,
        special=(-1,),
        needs=(LOSS_OF_EVALUATION, EVALUATION),
    )
    target_eval_loss: float = key(
        0.0,
        "Stop training once the evaluation loss is at or below this; 0 = never stop early",
        low=0,
        needs=(LOSS_OF_EVALUATION, EVALUATION),
    )
    abort_on_nan_loss: bool = key(
        True,
        "End the run with an error at a step whose loss or gradient norm is NaN; with "
        "skip_step_on_spikes such a step is skipped, and the tenth in a row ends the run; "
        "false = continue training",
    )
    abort_on_inf_loss: bool = key(
        True,
        "End the run with an error at a step whose loss or gradient norm is infinite; with "
        "skip_step_on_spikes such a step is skipped, and the tenth in a row ends the run; "
        "false = continue training",
    )
    enable_dropout: bool = key(True, "Whether training uses dropout; dropout_rate is its rate")
    dropout_rate: float = key(
        0.0,
        "Chance that an activation is zeroed in training, 0 to 1; 0 = none; needs enable_dropout",
        low=0,
        high=0.99,
    )
    enable_data_shuffling: bool = key(
        True, "Visit the training data in random order; false = in file order"
    )
    data_shuffle_seed: int = key(
        0, "Seed of the data order; the same seed gives the same batches", low=0, limit=INT64_MAX
    )
    init_weights_seed: int = key(
        0, "Seed of the initial weights; the same seed gives the same start", low=0, limit=INT64_MAX
    )


class Optimizer(Group):
    """Update rule, learning-rate schedule, clipping, accumulation and spike protection."""

    opt_type: OptimizerType = key(
        OptimizerType.ADAMW,
        "Update rule: adamw, adam_pax (bias-corrected decay inside the moments), sgd or muon "
        "(matrices; AdamW for the rest)",
    )
    skip_step_on_spikes: bool = key(
        False,
        "Skip the update of weights (with router biases and QK-clip) and optimizer on steps "
        "whose loss or raw gradient norm spikes or is not finite",
    )
    skip_step_interval: PositiveInt = key(
        128, "Steps in the rolling window that gives the mean and deviation for skip_step_on_spikes"
    )
    skip_step_scaling_factor: float = key(
        6.0, "Standard deviations above the rolling mean at which a step counts as a spike", low=1
    )
    gradient_accumulation_steps: PositiveInt = key(
        1, "Microbatches whose gradients are accumulated for one weight update; 1 = off"
    )
    use_tunix_gradient_accumulation: bool = key(
        False,
        "In post-training, leave accumulation over gradient_accumulation_steps to the Tunix "
        "trainer",
        status=inert.WHOLE_BATCH,
        accepts=True,
    )
    gradient_clipping_threshold: NonNegativeFloat = key(
        1.0,
        "Scale gradients down to this global L2 norm, over the weights that train, when they "
        "exceed it; 0 = no clipping",
    )
    learning_rate: NonNegativeFloat = key(
        3e-05, "Peak learning rate, reached at the end of warm-up"
    )
    lr_schedule_type: LearningRateScheduleType = key(
        LearningRateScheduleType.COSINE,
        "Shape after warm-up: cosine decay, or wsd (constant, then a short decay at the end)",
    )
    learning_rate_final_fraction: float = key(
        0.1, "Learning rate at the end of the schedule as a fraction of the peak", low=0, high=1
    )
    wsd_decay_steps_fraction: float = key(
        0.1,
        "Fraction of the schedule spent in the final decay; only lr_schedule_type=wsd",
        low=0,
        high=1,
    )
    wsd_decay_style: WsdDecayStyle = key(
        WsdDecayStyle.LINEAR,
        "Shape of the final decay: linear or cosine; only lr_schedule_type=wsd",
    )
    warmup_steps_fraction: float = key(
        0.1,
        "Fraction of the schedule in which the learning rate rises linearly from 0; 0 = no warm-up",
        low=0,
        high=1,
    )
    learning_rate_schedule_steps: int = key(
        -1,
        "Length of the schedule in steps, after which the rate is 0; -1 = same as steps",
        low=1,
        special=(-1,),
    )
    trainable_parameters_mask: list[str] = key(
        list,
        "Regexes of the parameters that train; the rest is frozen without optimizer state; "
        "empty = all train",
    )


class AdamW(Group):
    """Moments, stabilizers and weight decay of the Adam-type optimizers."""

    adam_b1: float = key(
        0.9, "Decay of Adam's running mean of gradients, 0 to 1; larger = smoother", low=0, high=1
    )
    adam_b2: float = key(
        0.95,
        "Decay of Adam's running mean of squared gradients, 0 to 1; larger = smoother",
        low=0,
        high=1,
    )
    adam_eps: float = key(
        1e-08, "Small number added to Adam's denominator, outside the square root", low=0
    )
    adam_eps_root: float = key(
        0.0, "Small number added inside the square root of Adam's denominator; 0 = none", low=0
    )
    adam_weight_decay: float = key(
        0.1,
        "Decoupled weight decay, multiplied by the learning rate; adamw_mask names exceptions",
        low=0,
    )
    adamw_mask: list[str] = key(
        list,
        "Regexes of parameters that get no weight decay, such as norms and biases; empty = "
        "all decay",
    )
    mu_dtype: str = key(
        "",
        "Dtype of Adam's first moment, such as bfloat16 to save memory; empty = dtype of the "
        "weights",
    )


class Muon(Group):
    """Momentum, decay and update scale of the Muon optimizer."""

    muon_beta: float = key(
        0.95, "Decay of Muon's momentum, 0 to 1; needs opt_type=muon", low=0, high=1
    )
    muon_weight_decay: float = key(
        0, "Decoupled weight decay on the matrices that Muon updates; 0 = none", low=0
    )
    muon_consistent_rms: float | None = key(
        None,
        "Scales Muon's updates to this RMS so that AdamW rates fit (0.2 is usual); none = "
        "scale by matrix width",
    )


class FineTuning(Group):
    """Post-training method to use, and the settings of its loss."""

    use_dpo: bool = key(
        False,
        "Train on pairs of a chosen and a rejected completion (preference optimization, "
        "dpo_loss_type)",
    )
    dpo_label_smoothing: float = key(
        0.0,
        "Assumed share of wrongly ordered preference pairs, 0 to 1; 0 = trust every label",
        low=0,
        high=1,
        needs=("use_dpo", SMOOTHED_LOSS),
    )
    dpo_beta: float = key(
        0.1,
        "Strength of the DPO regularization toward the reference model; larger stays closer to it",
        low=0,
        needs=("use_dpo", NOT_ORPO),
    )
    use_sft: bool = key(
        False,
        "Supervised fine-tuning: rows are conversations, prompts and completions, or texts, "
        "recognised by their columns, and targets that are not trained on are masked",
    )
    sft_train_on_completion_only: bool = key(
        False,
        "Train only on completions: the assistant's turns of a conversation; false = on every "
        "token",
        needs="use_sft",
    )
    formatting_func_path: str = key(
        "",
        "Your function that turns a record into a row: package.module.function or "
        "file.py:function; empty = none",
        is_path=True,
        needs=FINE_TUNING,
    )
    formatting_func_kwargs: dict = key(
        dict,
        "Keyword arguments of the formatting function; the JSON file at template_path is read, "
        "and passed as template_config",
        needs="formatting_func_path",
    )
    use_grpo: None | bool = key(
        None,
        "Train on rewards of sampled completions (reinforcement learning, GRPO); null: not chosen",
    )


class Preferences(Group):
    """Preference optimization beyond the published keys: loss, lengths and reference."""

    dpo_loss_type: Literal[
        "sigmoid", "hinge", "ipo", "robust", "simpo", "kto", "apo_zero", "apo_down", "orpo"
    ] = key(
        "sigmoid",
        "Loss over preference pairs: sigmoid is DPO; hinge, ipo, robust, kto, apo_zero, "
        "apo_down need a reference; simpo and orpo do not",
        needs="use_dpo",
    )
    orpo_lambda: float = key(
        0.1, "Weight of the odds-ratio term of dpo_loss_type=orpo", low=0, needs=ORPO
    )
    simpo_gamma: float = key(
        0.5,
        "Target margin of dpo_loss_type=simpo between the rewards of the chosen and the rejected "
        "completion",
        needs=SIMPO,
    )
    max_prompt_length: int | None = key(
        None,
        "Longest prompt of a preference pair, in tokens; longer prompts lose their beginning; "
        "null: half of max_target_length, for pairs that do not fit",
        low=1,
        needs=PAIRS,
    )
    precompute_reference_logps: bool = key(
        False,
        "Compute the log-probabilities of the reference once, before training, and free its "
        "weights",
        needs=("use_dpo", REFERENCE),
    )


class RewardModeling(Group):
    """Reward models: a head with one output, trained on preference pairs."""

    num_labels: NonNegativeInt = key(
        0,
        "Outputs of a head in place of the language-model head; 1: a reward model, trained on "
        "pairs of a chosen and a rejected completion; 0: a language model",
    )
    center_rewards_coefficient: float = key(
        0.0,
        "Weight of the squared sum of the two rewards of a pair, which keeps rewards around zero",
        low=0,
        needs=REWARD_MODEL,
    )


class Adapters(Group):
    """Low-rank adapters: which layers have them, how they start, and the format of the base."""

    enable_lora: bool | None = key(
        None,
        "false: train no adapters, whatever the lora_* keys are; null: train them if lora_rank or "
        "lora_restore_path is set",
        needs=LORA_IF_ENABLED,
    )
    lora_rank: NonNegativeInt = key(
        0, "Rank of the LoRA adapters that are trained instead of the weights; 0: none"
    )
    lora_alpha: float = key(
        0.0,
        "LoRA scale: alpha / rank, or alpha / sqrt(rank) with lora_use_rslora; 0: the rank",
        low=0,
        needs=ADAPTERS,
    )
    lora_module_path: str = key(
        "",
        "Pattern over the paths of weights that get an adapter, e.g. .*attention.*; empty: "
        "see lora_target_modules",
        needs=NEW_ADAPTERS,
    )
    lora_target_modules: str | list[str] | None = key(
        None,
        "Modules with adapters, as PEFT names them: a list, all-linear, or a pattern; null: "
        "all projections of attention and MLPs",
        needs=NEW_ADAPTERS,
    )
    lora_dropout: float = key(
        0.0, "Dropout on the input of the adapters", low=0, high=0.99, needs=ADAPTERS
    )
    lora_use_rslora: bool = key(False, "Scale adapters by alpha / sqrt(rank)", needs=ADAPTERS)
    lora_use_dora: bool = key(
        False,
        "DoRA: learn the magnitude of each output apart from its direction",
        needs=ADAPTERS,
    )
    lora_init: Literal["kaiming", "gaussian"] = key(
        "kaiming",
        "Start of the matrices A: kaiming (uniform, as PEFT) or gaussian; B starts at 0",
        needs=NEW_ADAPTERS,
    )
    lora_weight_qtype: Literal["int8", "int4", "nf4"] | None = key(
        None,
        "QLoRA: format of the frozen base weights, int8, int4 or nf4; null: weight_dtype",
        needs=ADAPTERS,
    )
    lora_tile_size: int = key(
        64,
        "Weights that share a scale in int4 and nf4, along the inputs",
        low=1,
        needs=FOUR_BIT_BASE,
    )
    lora_restore_path: str = key(
        "", "PEFT adapter to start from; its settings override the lora_* keys", is_path=True
    )
    max_adapters: int = key(
        8, "Adapters that can be loaded at a time for generation; each has a slot in memory", low=1
    )
