"""adapter_config.json and PEFT's rules of selection, against PEFT."""

import pytest

from maxtext.adapters.peft import LoraConfig, adapter_settings, shortest_names
from maxtext.common.errors import ConfigError

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in range(12)
    for name in (
        "self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.experts.1.down_proj",
        "linear_attn.out_proj",
    )
] + ["lm_head", "model.embed_tokens"]  # fmt: skip
SETTINGS = {"r": 8, "lora_alpha": 16, "peft_type": "LORA", "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["proj"]},
        {"target_modules": r".*\.(1|2)\.self_attn.*"},
        {"target_modules": ["model.layers.3.self_attn.v_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "experts.1.down_proj"], "layers_to_transform": [1, 11]},
        {"target_modules": ["down_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": ["down_proj", "lm_head"], "exclude_modules": r".*experts.*"},
        {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_selects_the_modules_that_peft_selects(options):
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    reference = peft.LoraConfig(**options)
    config = LoraConfig.from_json(SETTINGS | options, "adapter_config.json")
    expected = []
    for module in MODULES:
        match = check_target_module_exists(reference, module)
        if match and type(match).__name__ != "_ExcludedModule":
            expected.append(module)
    assert [module for module in MODULES if config.selects(module)] == expected


def test_ranks_and_alphas_by_pattern_are_those_of_peft():
    pytest.importorskip("peft")
    from peft.utils.other import get_pattern_key

    patterns = {r"layers\.1\.self_attn\.q_proj": 2, "down_proj": 3, "v_proj": 4}
    settings = SETTINGS | {"rank_pattern": patterns, "alpha_pattern": patterns}
    config = LoraConfig.from_json(settings, "adapter_config.json")
    for module in MODULES:
        key = get_pattern_key(list(patterns), module)
        assert config.rank(module) == patterns.get(key, 8)
        assert config.alpha(module) == patterns.get(key, 16)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"target_parameters": "experts.down_proj"}, "target_parameters='experts.down_proj' must"),
        ({"target_parameters": ["down_proj"], "use_dora": True}, "use_dora=true is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"init_lora_weights": "lora_ga"}, "changes the base weights"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config="),
        ({"r": 0}, "r=0 must be a positive number"),
        ({"target_modules": None}, "target_modules=None must be a text or a list"),
    ],
)
def test_refuses_what_it_cannot_represent(change, part):
    with pytest.raises(ConfigError, match="adapter_config.json: ") as error:
        LoraConfig.from_json(SETTINGS | change, "adapter_config.json")
    assert part in str(error.value)


def test_parameters_need_no_modules():
    settings = SETTINGS | {"target_modules": None, "target_parameters": ["mlp.gate.weight"]}
    settings |= {"rank_pattern": {r".*\.gate.weight": 3}}
    config = LoraConfig.from_json(settings, "adapter_config.json")
    assert config.selects_parameter("model.layers.1.mlp.gate.weight")
    assert not config.selects_parameter("model.layers.1.block_mlp.gate.weight")
    assert not any(config.selects(module) for module in MODULES)
    assert config.rank(config.target("model.layers.1.mlp.gate")) == 3
    assert config.rank(config.target("model.layers.1.other.gate")) == 8


def test_writes_last_names_unless_they_select_other_modules():
    attention = [module for module in MODULES if module.endswith("q_proj")]
    assert shortest_names(attention, MODULES) == ["q_proj"]
    assert shortest_names(attention[:2], MODULES) == sorted(attention[:2])
    dense = [module for module in MODULES if module.endswith("mlp.down_proj")]
    assert shortest_names(dense, MODULES) == sorted(dense)


def test_written_settings_give_back_ranks_and_alphas():
    ranks = {module: 4 if "q_proj" in module else 2 for module in MODULES[:20]}
    alphas = {module: 8.0 if "v_proj" in module else 1.5 for module in MODULES[:20]}
    settings = adapter_settings(ranks, alphas, MODULES, "base")
    config = LoraConfig.from_json(settings, "adapter_config.json")
    assert {module for module in MODULES if config.selects(module)} == set(ranks)
    assert {module: config.rank(module) for module in ranks} == ranks
    assert {module: config.alpha(module) for module in ranks} == alphas
