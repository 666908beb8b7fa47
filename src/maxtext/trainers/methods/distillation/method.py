"""Distillation as methods: from a teacher that runs with the student, on policy from completions
that the student samples (GKD), and from logits that a teacher wrote earlier."""

from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.row_formats import RowFormat, with_teacher_logits
from maxtext.input_pipeline.teacher_logits import top_k_of
from maxtext.layers.parameters import Template
from maxtext.models.transformer import build_context, make_template
from maxtext.sharding import AxisRules
from maxtext.trainers.loop import TrainStep
from maxtext.trainers.methods.distillation.learn_to_init import LearnToInit
from maxtext.trainers.methods.distillation.objective import DistillationObjective, GKDObjective
from maxtext.trainers.methods.distillation.offline import OfflineDistillationObjective
from maxtext.trainers.methods.distillation.teacher import check_features, teacher_config
from maxtext.trainers.methods.distillation.weight_maps import WeightMaps
from maxtext.trainers.methods.language_modeling import sequence_format
from maxtext.trainers.methods.method import Method, StepSetup


def distillation_objective(
    config: MaxTextConfig, template: Template, rules: AxisRules
) -> DistillationObjective:
    """Raises ConfigError if the student cannot learn from its teacher."""
    teacher = teacher_config(config, rules)
    teacher_template = make_template(teacher, build_context(teacher, rules)).for_cast
    if config.distill_beta > 0:
        check_features(config, teacher)
    learn_to_init = None
    computed: tuple[str, ...] = ()
    if config.learn_to_init_mode:
        learn_to_init = LearnToInit.from_config(config, template, teacher, teacher_template)
        template, computed = learn_to_init.template, learn_to_init.names
    objective = GKDObjective if config.use_gkd else DistillationObjective
    return objective(
        config,
        template,
        teacher_config=teacher,
        teacher_template=teacher_template,
        maps=WeightMaps.from_config(config, template, teacher, teacher_template, computed),
        learn_to_init=learn_to_init,
        has_prompts=config.use_sft,
    )


def offline_objective(
    config: MaxTextConfig, template: Template, rules: AxisRules
) -> OfflineDistillationObjective:
    return OfflineDistillationObjective(
        config, template, top_k=top_k_of(config), has_prompts=config.use_sft
    )


def offline_format(config: MaxTextConfig) -> RowFormat:
    return with_teacher_logits(sequence_format(config))


def sample_first(setup: StepSetup) -> TrainStep:
    from maxtext.trainers.methods.distillation.on_policy import OnPolicyStep

    return OnPolicyStep(setup)


DISTILLATION = Method(
    "distillation",
    is_chosen=lambda config: bool(config.teacher_overrides),
    row_format=sequence_format,
    objective=distillation_objective,
)
GKD = Method(
    "on-policy distillation",
    is_chosen=lambda config: bool(config.teacher_overrides) and config.use_gkd,
    row_format=sequence_format,
    objective=distillation_objective,
    wrap_step=sample_first,
)
OFFLINE = Method(
    "offline distillation",
    is_chosen=lambda config: bool(config.offline_data_dir),
    row_format=offline_format,
    objective=offline_objective,
)
