"""The config.json that we write is of the model that we run: transformers reads it and computes the
same. And one that says little is read as transformers reads it."""

import json

import jax
import numpy as np
import pytest
import transformers
import zoo

from maxtext import LLM
from maxtext.checkpoint.open import save_hf_folder, with_max_positions
from maxtext.checkpoint.weights import ModelWeights
from maxtext.common.errors import UserError
from maxtext.configs import fields
from maxtext.configs.sources import from_python
from maxtext.models.configuration import load
from maxtext.models.hf_registry import MAPPINGS, hf_config, mapping_of, model_layer, read_config
from maxtext.models.registry import FAMILIES, layers
from maxtext.models.transformer import make_template

TINY = {
    "override_model_config": True,
    "vocab_size": zoo.VOCABULARY,
    "base_emb_dim": 48,
    "base_num_query_heads": 4,
    "base_num_decoder_layers": 3,
    "max_target_length": 64,
}
HEADS = {"base_num_kv_heads": 2, "head_dim": 16}
DENSE = HEADS | {"base_mlp_dim": 88}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "base_moe_mlp_dim": 40}
SPARSE = HEADS | EXPERTS
CHUNKED = SPARSE | {"num_experts_per_tok": 1, "chunk_attn_window_size": 7}
WINDOW = {"sliding_window_size": 5}
GEMMA4 = (
    DENSE | WINDOW | {"base_num_decoder_layers": 6, "global_head_dim": 24, "global_num_kv_heads": 1}
)
DELTA = SPARSE | {
    "gdn_key_head_dim": 16,
    "gdn_value_head_dim": 12,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4,
    "base_num_decoder_layers": 4,
}
LATENT = {
    "base_num_kv_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "base_moe_mlp_dim": 40,
    "base_mlp_dim": 88,
    "first_num_dense_layers": 1,
}
GROUPED = LATENT | {"q_lora_rank": 24, "n_routing_groups": 4, "topk_routing_group": 2}
# Named models, at least one of each block, and the sizes that make them tiny.
MODELS = {
    "llama3.1-8b": DENSE,
    "llama4-17b-16e": CHUNKED | {"base_num_decoder_layers": 5},
    "mistral-7b": DENSE,
    "mixtral-8x7b": SPARSE,
    "gemma-2b": DENSE | {"base_num_kv_heads": 1},
    "gemma2-27b": DENSE | WINDOW | {"base_num_decoder_layers": 1},
    "gemma3-4b": DENSE | WINDOW | {"base_num_decoder_layers": 7},
    "gemma4-26b": GEMMA4 | EXPERTS,
    "qwen2.5-1.5b": DENSE,
    "qwen3-0.6b": DENSE,
    "qwen3-30b-a3b": SPARSE,
    "qwen3-next-80b-a3b": DELTA,
    "qwen3.5-397b-a17b": DELTA | {"base_num_decoder_layers": 1},
    "deepseek2-16b": LATENT,
    "deepseek3-671b": GROUPED,
    "deepseek3.2-671b": GROUPED
    | {"indexer_head_dim": 16, "indexer_n_heads": 24, "indexer_topk": 12},
    "kimi-k2-1t": LATENT | {"q_lora_rank": 24},
    "gpt-oss-20b": SPARSE | WINDOW,
    "olmo2-7b": DENSE,
    "olmo3-7b": DENSE | WINDOW | {"base_num_decoder_layers": 5},
    "phi-3-mini": DENSE | WINDOW,
    "command-r-35b": DENSE | {"head_dim": 12},
    "command-r7b": DENSE | WINDOW | {"head_dim": 12, "base_num_decoder_layers": 5},
    "glm4.5-355b-a32b": SPARSE | {"base_mlp_dim": 88, "first_num_dense_layers": 1},
    "minimax-m2-230b-a10b": SPARSE,
    "smollm3-3b": DENSE | {"base_num_decoder_layers": 5},
    "seed-oss-36b": DENSE,
    "exaone4-32b": DENSE | WINDOW | {"base_num_decoder_layers": 5},
    "ernie4.5-0.3b": DENSE,
    "gpt3-52k": DENSE | {"base_num_kv_heads": 4, "head_dim": 12, "trainable_position_size": 64},
}


def configured(settings):
    return load(None, from_python(with_max_positions(settings, zoo.SETTINGS)), model=settings)


@pytest.mark.parametrize("name", zoo.parameters(zoo.CASES))
def test_written_anew(name, specimen, model, tmp_path):
    """Without what came with the weights: config.json, and the names of tensors where there are two
    ways.
    """
    example, llm = specimen(name), model(name)
    save_hf_folder(
        tmp_path, llm.config, llm.param_infos, ModelWeights(llm.weights, llm.param_infos)
    )
    assert zoo.distance(zoo.hf_logits(tmp_path, example.ids), example.logits) < 1e-6
    again = configured(model_layer(read_config(tmp_path), "config.json"))
    assert layers(again) == layers(llm.config)


@pytest.mark.parametrize("name", zoo.parameters(MODELS, {"gemma2-27b"}))
def test_of_a_named_model(name, tmp_path):
    config = load(None, from_python(zoo.SETTINGS | TINY | MODELS[name] | {"model_name": name}))
    template, noise = make_template(config), np.random.default_rng(0)

    def fresh(path, leaf):
        middle = 1.0 if path[-1].key == "scale" else 0.0
        return np.float32(noise.normal(middle, 0.2, leaf.shape))

    llm = LLM(config, template, jax.tree.map_with_path(fresh, template.weights))
    llm.save_hf(tmp_path)
    ids = noise.integers(3, zoo.VOCABULARY, (zoo.ROWS, zoo.LENGTH))
    expected, tolerance = zoo.logits_and_tolerance(tmp_path, ids)
    assert zoo.distance(llm.logits(ids), expected) < tolerance


def test_of_a_fresh_model(tmp_path):
    llm = LLM.load("qwen3-0.6b", **(zoo.SETTINGS | TINY | DENSE))
    llm.save_hf(tmp_path)
    ids = np.arange(3, 100).reshape(1, -1)
    expected, tolerance = zoo.logits_and_tolerance(tmp_path, ids)
    assert zoo.distance(llm.logits(ids), expected) < tolerance


def test_all_mappings_are_tested(specimen):
    blocks = {load(None, from_python({"model_name": name})).decoder_block.value for name in MODELS}
    assert blocks == {name for name, family in FAMILIES.items() if family.hf}
    mappings = [mapping_of(read_config(specimen(name).folder), name) for name in zoo.ONE_EACH]
    assert {mapping.model_type for mapping in mappings} == {
        mapping.model_type for mapping in MAPPINGS
    }


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: mapping.model_type)
def test_absent_entry_has_the_default_of_the_transformers_class(mapping):
    given = {"architectures": [mapping.architectures[0]]}
    if mapping.model_type == "gemma4_text":
        given["hidden_size_per_layer_input"] = 0  # what the class has by default is not supported
    if mapping.model_type == "deepseek_v2":
        given["num_experts_per_tok"] = 6  # nor can a model be made of none
    if mapping.model_type == "glm4_moe":
        given["head_dim"] = 128  # without it, 21 dimensions would rotate, an odd number
    config = transformers.AutoConfig.for_model(mapping.model_type, **given)
    full = json.loads(config.to_json_string(use_diff=False)) | given
    expected = model_layer(full, "config.json")
    for name in sorted(full.keys() - given.keys()):
        read = model_layer(
            {entry: value for entry, value in full.items() if entry != name}, "config.json"
        )
        if read != expected:  # said in another way, perhaps
            assert layers(configured(read)) == layers(configured(expected)), name
    assert layers(configured(model_layer(given, "config.json"))) == layers(configured(expected))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama3.1-8b", {"mlp_activations": ["sigmoid", "linear"]}, "mlp_activations=.*silu"),
        ("llama3.1-8b", {"rope_min_timescale": 2}, "rope_min_timescale"),
        ("llama3.1-8b", {"use_qk_norm": True}, "LlamaForCausalLM cannot say: attention.qk_norm$"),
        ("llama3.1-8b", {"attn_logits_soft_cap": 2.0}, "attention.soft_cap=2.0"),
        ("llama3.1-8b", {"final_logits_soft_cap": 2.0}, "final_logits_soft_cap=2.0"),
        ("llama3.1-8b", {"nope_layer_interval": 2}, "no attention.rope"),
        (
            "llama3.1-8b",
            {"attention_type": "local_sliding"} | WINDOW,
            "attention.mask.window=5",
        ),
        (
            "llama3.1-8b",
            {"rope_type": "yarn", "rope_interleave": True},
            "attention.rope=.*interleave=True",
        ),
        ("llama3.1-8b", {"use_untrainable_positional_embedding": True}, "without rotary positions"),
        ("qwen3-0.6b", {"normalize_embedding_logits": True}, "normalize_embedding_logits=True"),
        ("qwen3-0.6b", {"use_qk_norm": False}, "no attention.qk_norm"),
        ("mixtral-8x7b", {"routed_scaling_factor": 2.0}, "mlp.router.scaling=2.0"),
        ("gpt3-52k", {"head_dim": 16}, "head_dim=16 must be 48 / 4"),
    ],
)
def test_what_has_no_entry_is_refused(name, changes, words):
    """And is not left out in silence."""
    config = load(None, from_python(TINY | MODELS[name] | {"model_name": name} | changes))
    with pytest.raises(UserError, match=words):
        hf_config(config, "float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"fused_qkv": True, "fused_mlp": True},
        {"attention": "flash"},
        {"enable_dropout": True, "dropout_rate": 0.1},
    ],
)
def test_how_it_is_computed_is_no_part_of_it(changes):
    words = TINY | DENSE | {"model_name": "llama3.1-8b"}
    plain, other = (load(None, from_python(words | more)) for more in ({}, changes))
    assert hf_config(other, "float32") == hf_config(plain, "float32")


@pytest.mark.slow
def test_every_named_model_has_one_that_transformers_takes():
    without = []
    for name in fields.choices("model_name"):
        config = load(None, from_python({"model_name": name}))
        try:
            written = hf_config(config, "bfloat16")
        except UserError:
            without.append(name)
            continue
        read = transformers.AutoConfig.for_model(**written)
        assert (read.vocab_size, read.num_hidden_layers) == (
            config.vocab_size,
            len(layers(config)),
        ), name
    # With hyper-connections and n-grams, and with a narrow space for experts.
    assert without == ["deepseek-custom", "qwen3-custom-30b-a3b"]
