"""From the keys of a configuration to the objective of its method."""

from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.teacher_logits import top_k_of
from maxtext.layers.adapters import AdapterSpec
from maxtext.layers.parameters import Template
from maxtext.models.transformer import build_context, make_template
from maxtext.sharding import AxisRules
from maxtext.trainers.adapters import base_template, model_context
from maxtext.trainers.distillation.features import check_features
from maxtext.trainers.distillation.gkd import GKDObjective
from maxtext.trainers.distillation.learn_to_init import LearnToInit
from maxtext.trainers.distillation.objective import DistillationObjective
from maxtext.trainers.distillation.offline import OfflineDistillationObjective
from maxtext.trainers.distillation.teacher import teacher_config
from maxtext.trainers.distillation.weight_maps import WeightMaps
from maxtext.trainers.objective import LanguageModelObjective, Objective
from maxtext.trainers.preference.objective import PreferenceObjective
from maxtext.trainers.rl.grpo import GRPOObjective


def build_objective(
    config: MaxTextConfig, rules: AxisRules, adapters: AdapterSpec | None = None
) -> Objective:
    """`adapters`: those that are trained, over a frozen base."""
    template = make_template(config, model_context(config, rules, adapters=adapters))
    if config.mtp_num_layers and (config.use_dpo or config.use_grpo or config.teacher_overrides):
        LOGGER.warning("the MTP layers of the model are not trained: this method has no such loss")
    if config.use_grpo:
        return GRPOObjective(config, template, base_template=base_template(config, rules))
    if config.use_dpo:
        return PreferenceObjective(config, template, base_template=base_template(config, rules))
    if config.teacher_overrides:
        return build_distillation(config, template, rules)
    if config.offline_data_dir:
        return OfflineDistillationObjective(config, template, top_k=top_k_of(config))
    return LanguageModelObjective(config, template)


def build_distillation(
    config: MaxTextConfig, template: Template, rules: AxisRules
) -> DistillationObjective:
    """Raises ConfigError if the student cannot learn from its teacher."""
    teacher = teacher_config(config, rules)
    teacher_template = make_template(teacher, build_context(teacher, rules))
    if config.distill_beta > 0:
        check_features(config, teacher)
    learn_to_init = None
    computed: tuple[str, ...] = ()
    if config.learn_to_init_mode:
        learn_to_init = LearnToInit.from_config(config, template, teacher, teacher_template)
        template, computed = learn_to_init.template, learn_to_init.names
    method = GKDObjective if config.use_gkd else DistillationObjective
    return method(
        config,
        template,
        teacher_config=teacher,
        teacher_template=teacher_template,
        maps=WeightMaps.from_config(config, template, teacher, teacher_template, computed),
        learn_to_init=learn_to_init,
    )
