"""Every named model resolves, to the published sizes where those are at hand."""

import json
from pathlib import Path

import pytest

from maxtext.configs import fields
from maxtext.configs.derive import Devices
from maxtext.configs.load import published_tokenizers
from maxtext.models.configuration import load

NAMES = fields.choices("model_name")
SHARED = Path(__file__).parents[3] / "shared" / "spec" / "model_facts.json"
FACTS = json.loads(SHARED.read_text()) if SHARED.exists() else {}


def test_names_are_unique_and_include_the_published_ones():
    assert len(NAMES) == len(set(NAMES)) >= 68


@pytest.mark.parametrize("name", NAMES)
def test_model_resolves(name):
    config = load(None, [f"model_name={name}"], environ={}, devices=Devices(1))
    assert config.model_name == name
    assert config.num_query_heads % config.num_kv_heads == 0
    if name != "default":
        assert config.source("base_emb_dim").kind == "model"


def test_the_published_values_are_of_known_models():
    assert set(FACTS) <= set(NAMES)


@pytest.mark.skipif(not FACTS, reason="the published values are not next to this checkout")
@pytest.mark.parametrize("name", sorted(FACTS))
def test_model_has_the_published_values(name):
    facts = FACTS[FACTS[name].get("same_as", name)]
    config = load(None, [f"model_name={name}"], environ={}, devices=Devices(1))
    for key, value in facts.items():
        if (
            key == "logical_axis_rules"
        ):  # merged into the base rules: each name has exactly the model's rules
            wanted = [[rule, [axes] if isinstance(axes, str) else axes] for rule, axes in value]
            names = {rule for rule, _ in wanted}
            assert sorted(rule for rule in config.logical_axis_rules if rule[0] in names) == sorted(
                wanted
            )
        else:
            assert fields.is_same(key, getattr(config, key), value), key


# Scaled RoPE is part of Llama 3.1 and 3.3, and group-limited routing of DeepSeek V3, in their
# published config.json.
@pytest.mark.parametrize(
    "name", ["llama3.1-8b", "llama3.1-8b-Instruct", "llama3.1-405b", "llama3.3-70b"]
)
def test_llama_31_scales_its_rope(name):
    assert (
        load(None, [f"model_name={name}"], environ={}, devices=Devices(1)).rope_type == "llama3.1"
    )


def test_deepseek_3_routes_to_four_of_eight_groups():
    config = load(None, ["model_name=deepseek3-671b"], environ={}, devices=Devices(1))
    assert (config.n_routing_groups, config.topk_routing_group) == (8, 4)


def test_tokenizers_are_published_for_known_models_only():
    assert set(published_tokenizers()) <= set(NAMES)
