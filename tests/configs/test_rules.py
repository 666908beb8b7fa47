"""Rules report a problem as data: the key, the kind of problem and the message."""

import pytest

from maxtext.checkpoint.open import model_text
from maxtext.common.errors import ConfigError
from maxtext.configs import fields, rules
from maxtext.configs.derive import Devices
from maxtext.configs.problems import ProblemKind
from maxtext.configs.provenance import Source
from maxtext.configs.rules.rule import DERIVED_RULES, RANGES, RULES
from maxtext.models.configuration import load
from maxtext.models.rule import LAYER_RULES


def test_every_rule_is_registered_for_a_key():
    groups = (RANGES, RULES, DERIVED_RULES, LAYER_RULES)
    assert all(group.rules for group in groups)
    assert {rule.key for group in groups for rule in group.rules} <= fields.KEYS.keys()


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ({"moba_topk": 3}, ProblemKind.INERT),
        ({"attention": "flush"}, ProblemKind.UNKNOWN_CHOICE),
        ({"use_indexer": True}, ProblemKind.CONFLICT),
    ],
)
def test_a_problem_names_its_key_and_kind(setting, kind):
    config = load(None, [], devices=Devices(1)).attributed_to(Source("python"))
    (key,) = setting
    problems = rules.check_settings(config.model_copy(update=setting))
    assert kind in {problem.kind for problem in problems if problem.key == key}


def test_attributing_a_configuration_leaves_the_original_alone():
    config = load(None, [], devices=Devices(1))
    source = Source("file", "config.yml")
    assert config.attributed_to(source).source("steps") == source
    assert config.source("steps").kind == "default"


def test_the_text_of_a_model_leaves_out_keys_that_would_have_no_effect():
    config = load(
        None, ["model_name=llama3.1-8b", "override_model_config=true"], devices=Devices(1)
    )
    text = model_text(config.model_copy(update={"moba_topk": 3, "q_lora_rank": 7}))
    assert "base_emb_dim: 4096" in text
    assert "moba_topk" not in text
    assert "q_lora_rank" not in text


@pytest.mark.parametrize(
    ("axis", "remedy"),
    [
        ("sequence", "ici_context_parallelism splits sequences"),
        ("tensor_transpose", "ici_tensor_parallelism splits layers"),
        ("context_autoregressive", "it splits the KV cache of generation, and training has none"),
    ],
)
@pytest.mark.parametrize("network", ["ici", "dcn"])
def test_mesh_axes_without_a_rule_are_refused_with_what_to_use(network, axis, remedy):
    key = f"{network}_{axis}_parallelism"
    with pytest.raises(ConfigError, match=f"{key}=2 would split nothing: .*{remedy}"):
        load(None, [f"{key}=2"], environ={}, devices=Devices(2, 1 if network == "ici" else 2))
    rule = f"logical_axis_rules=[[activation_length, [{axis}]]]"
    load(None, [f"{key}=2", rule], environ={}, devices=Devices(2, 1 if network == "ici" else 2))
