"""Multi-token prediction layers of a folder draft the tokens that they draft in transformers."""

import copy

import jax
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.generation import candidate_generator

from maxtext import LLM
from tests.parity.zoo import SETTINGS, SIZES, continued, hf_model, stir
from tests.support.drafts import recorded_drafts

DEEPSEEK = SIZES | dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)
DEEPSEEK.pop("head_dim")
QWEN = SIZES | dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
)
PROMPT = [5, 9, 17, 100, 42, 7]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """DeepSeek 3 with a layer beyond the last, as published."""
    where = tmp_path_factory.mktemp("deepseek")
    config = transformers.DeepseekV3Config(**DEEPSEEK)
    torch.manual_seed(3)

    def saved(config, name):
        model = transformers.DeepseekV3ForCausalLM(config)
        stir(model)
        model.float().save_pretrained(where / name)
        return load_file(where / name / "model.safetensors")

    tensors, prefix = saved(config, "model"), f"model.layers.{DEEPSEEK['num_hidden_layers']}."
    # At first the only layer of a model, so that transformers writes its experts one by one.
    for name, tensor in saved(config.get_mtp_config(), "layer").items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0.", prefix)] = tensor
    assert f"{prefix}mlp.experts.0.down_proj.weight" in tensors
    size, generator = DEEPSEEK["hidden_size"], torch.Generator().manual_seed(2)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)
    projection = torch.randn(size, 2 * size, generator=generator) / 9
    tensors[f"{prefix}eh_proj.weight"] = projection
    save_file(tensors, where / "model/model.safetensors", {"format": "pt"})
    return where / "model"


def transformers_drafts(folder, monkeypatch):
    """The first token that it drafts, by the position before it, and its completion."""
    drafts = {}
    generator = candidate_generator.MTPCandidateGenerator
    get_candidates = generator.get_candidates

    def record(self, input_ids, *args, **options):
        candidates, logits = get_candidates(self, input_ids, *args, **options)
        if candidates.shape[1] > input_ids.shape[1]:
            position = input_ids.shape[1] - 1
            drafts[position] = int(candidates[0, position + 1])
        return candidates, logits

    monkeypatch.setattr(generator, "get_candidates", record)
    # Which tensors it takes for those of the layer: of the published model, layer 61's.
    layer = rf"model\.layers\.{DEEPSEEK['num_hidden_layers']}\..*"
    model_class = transformers.DeepseekV3PreTrainedModel
    monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", [layer])
    ids = torch.tensor([PROMPT])
    output = hf_model(folder).generate(
        ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, use_mtp=True
    )
    return drafts, output[0, len(PROMPT) :].tolist()


def check_drafts(folder, expected, completion, monkeypatch):
    """One draft after each position, and the greedy tokens."""
    monkeypatch.setattr("maxtext.inference.engine.acceptance.PAUSE_PROGRAMS", 0)
    steps = recorded_drafts(monkeypatch)
    llm = LLM.load(folder, **SETTINGS, speculative_method="mtp", num_speculative_tokens=1)
    assert llm.config.mtp_num_layers == 1
    assert llm.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True) == completion
    jax.effects_barrier()
    drafts = {position: drafts[0] for position, drafts in steps if drafts[0] >= 0}
    assert len(drafts.keys() & expected.keys()) > NEW_TOKENS / 2
    for position in drafts.keys() & expected.keys():
        assert drafts[position] == expected[position]
    return llm


@pytest.mark.slow
def test_drafts_of_deepseek(folder, monkeypatch):
    expected, completion = transformers_drafts(folder, monkeypatch)
    check_drafts(folder, expected, completion, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3Next", "Qwen3_5MoeText"])
def test_drafts_of_qwen(kind, tmp_path, monkeypatch):
    """Whose layers transformers does not run. As published, the layer is one with full attention,
    and reads the hidden states after the model's final norm, as in vLLM."""
    config_class = getattr(transformers, f"{kind}Config")
    model_class = transformers.AutoModelForCausalLM
    torch.manual_seed(4)
    models, tensors = {}, {}
    for name, options in (
        ("model", QWEN),
        ("layer", QWEN | dict(num_hidden_layers=1, layer_types=["full_attention"])),
    ):
        model = model_class.from_config(config_class(**options), attn_implementation="eager")
        stir(model)
        model.float().save_pretrained(tmp_path / name)
        models[name] = hf_model(tmp_path / name)
        tensors[name] = load_file(tmp_path / name / "model.safetensors")
    size = QWEN["hidden_size"]
    added = {
        "mtp.fc.weight": torch.randn(size, 2 * size) / 9,
        "mtp.pre_fc_norm_embedding.weight": 0.3 * torch.randn(size),
        "mtp.pre_fc_norm_hidden.weight": 0.3 * torch.randn(size),
        "mtp.norm.weight": tensors["layer"]["model.norm.weight"],
    }
    for name, tensor in tensors["layer"].items():
        if name.startswith("model.layers.0."):
            added[name.replace("model.layers.0.", "mtp.layers.0.")] = tensor
    save_file(tensors["model"] | added, tmp_path / "model/model.safetensors", {"format": "pt"})

    model, layer = models["model"], models["layer"]
    completion = continued(model, PROMPT, NEW_TOKENS)
    ids = torch.tensor([[*PROMPT, *completion]])

    def norm(x, name):
        norm = copy.deepcopy(model.model.norm)
        norm.weight.data = added[f"mtp.{name}.weight"]
        return norm(x)

    with torch.no_grad():
        hidden = norm(model.model(ids).last_hidden_state[:, :-1], "pre_fc_norm_hidden")
        embedded = norm(model.model.embed_tokens(ids[:, 1:]), "pre_fc_norm_embedding")
        x = torch.cat([embedded, hidden], -1) @ added["mtp.fc.weight"].T
        drafts = model.lm_head(layer.model(inputs_embeds=x).last_hidden_state).argmax(-1)
    expected = {position + 1: draft for position, draft in enumerate(drafts[0].tolist())}
    llm = check_drafts(tmp_path / "model", expected, completion, monkeypatch)
    llm.save_hf(tmp_path / "written")
    written = load_file(tmp_path / "written/model.safetensors")
    assert {name for name in written if name.startswith("mtp.")} == added.keys()
    for name, tensor in added.items():
        assert written[name].equal(tensor), name


@pytest.mark.slow
def test_drafts_with_adapters(folder, tmp_path):
    """Of sequences with an adapter and without in one batch, in the layer that drafts as well."""
    prompts, options = [PROMPT, PROMPT, PROMPT[:3]], dict(max_new_tokens=12, ignore_eos=True)
    config = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["o_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(1)
    peft.get_peft_model(hf_model(folder), config).save_pretrained(tmp_path / "lora")
    keys = SETTINGS | dict(adapters=[tmp_path / "lora"])
    expected = LLM.load(folder, **keys).generate(prompts, adapter=["lora", "", "lora"], **options)
    assert expected[0] != expected[1]
    llm = LLM.load(folder, **keys, speculative_method="mtp", num_speculative_tokens=2)
    assert llm.generate(prompts, adapter=["lora", "", "lora"], **options) == expected
    assert llm.engine.drafts.num_drafted > 0
