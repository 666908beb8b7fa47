"""Distillation: what a student model learns from a teacher, and on which completions."""

from typing import Literal

from pydantic import PositiveInt

from maxtext.common.types import Json
from maxtext.configs.types.key import (
    A_TEACHER,
    FEATURE_LOSS,
    FINE_TUNING_OR_TEACHER,
    NO_GKD,
    RUNNING_TEACHER,
    SAMPLED_COMPLETIONS,
    Group,
    key,
)


class Distillation(Group):
    """How a student model is trained on a teacher's outputs and weights."""

    student_overrides: Json = key(
        dict,
        "Config keys and values that apply to the student model only, such as model_name",
        needs=A_TEACHER,
    )
    teacher_overrides: Json = key(
        dict,
        "Config keys and values that apply to the teacher only, such as model_name and "
        "load_parameters_path",
    )
    offline_data_dir: str | None = key(
        None,
        "Folder of `maxtext distill-logits`, the training data with a teacher's logits; none "
        "= run a teacher",
        is_path=True,
    )
    distill_alpha: float = key(
        0.5,
        "Weight of the teacher KL term, 0 to 1; the true-label loss gets the rest",
        low=0,
        high=1,
        needs=(A_TEACHER, NO_GKD),
    )
    distill_temperature: float = key(
        1.0,
        "Softens teacher and student probabilities before the KL; the KL is scaled by its square",
        needs=A_TEACHER,
    )
    distill_beta: float = key(
        0.0,
        "Weight of the feature loss between the attention outputs of student and teacher "
        "layers; 0 = off",
        low=0,
        needs=(RUNNING_TEACHER, NO_GKD),
    )
    distill_feature_loss_type: Literal["cosine", "l2"] = key(
        "cosine",
        "Distance between student and teacher features: cosine or l2; needs distill_beta > 0",
        needs=FEATURE_LOSS,
    )
    distill_layer_indices: None | list = key(
        None,
        "Layers whose attention outputs enter the feature loss; none = all layers, if both models "
        "have the same number",
        needs=FEATURE_LOSS,
    )
    distill_alpha_end: float | None = key(
        None,
        "Value distill_alpha reaches at the last step of its schedule; none = keep the start value",
        low=0,
        high=1,
        needs=(A_TEACHER, NO_GKD),
    )
    distill_alpha_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "Path from distill_alpha to distill_alpha_end: constant, linear or cosine",
        needs=(A_TEACHER, NO_GKD),
    )
    distill_temperature_end: float | None = key(
        None,
        "Value distill_temperature reaches at the last step; none = keep the start value",
        needs=A_TEACHER,
    )
    distill_temperature_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "Path from distill_temperature to distill_temperature_end: constant, linear or cosine",
        needs=A_TEACHER,
    )
    distill_beta_end: float | None = key(
        None,
        "Value distill_beta reaches at the last step of its schedule; none = keep the start value",
        low=0,
        needs=(RUNNING_TEACHER, NO_GKD),
    )
    distill_beta_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "Path from distill_beta to distill_beta_end: constant, linear or cosine",
        needs=(RUNNING_TEACHER, NO_GKD),
    )
    learn_to_init_mode: bool = key(
        False,
        "Learn to init: train maps from the teacher's attention weights to the student's, instead "
        "of the student's weights",
        needs=RUNNING_TEACHER,
    )
    lti_use_general_linear_map: bool = key(
        False,
        "In learn_to_init_mode, use one full linear map instead of separate head and head_dim maps",
        needs="learn_to_init_mode",
    )
    distill_weights_copy_map: Json = key(
        dict,
        "Map from patterns of teacher parameters to paths of the student: weights copied before "
        "training",
        needs=RUNNING_TEACHER,
    )
    distill_student_weights_share_map: Json = key(
        dict,
        "Map from patterns of student parameters to other paths of the student, which use the "
        "same weights",
        needs=RUNNING_TEACHER,
    )
    student_params_to_update: None | list = key(
        None,
        "Name patterns of the parameters that distillation and fine-tuning train; none = all "
        "of them",
        needs=FINE_TUNING_OR_TEACHER,
    )


class GeneralizedDistillation(Group):
    """GKD: a divergence from the teacher, on completions that the student samples."""

    use_gkd: bool = key(
        False,
        "Minimize the generalized Jensen-Shannon divergence from the teacher instead of KL "
        "and true labels",
        needs=RUNNING_TEACHER,
    )
    gkd_lambda: float = key(
        0.5,
        "Share of the batches whose completions the student samples; the other batches keep the "
        "completions of the data",
        low=0,
        high=1,
        needs="use_gkd",
    )
    gkd_beta: float = key(
        0.5,
        "0 = forward KL(teacher || student), 1 = reverse KL, between = Jensen-Shannon",
        low=0,
        high=1,
        needs="use_gkd",
    )
    gkd_max_new_tokens: PositiveInt = key(
        128,
        "Maximum number of tokens of a sampled completion; max_target_length also limits them",
        needs=SAMPLED_COMPLETIONS,
    )
    gkd_seq_kd: bool = key(
        False,
        "Let the teacher sample the completions of the other batches: sequence-level distillation",
        needs="use_gkd",
    )
