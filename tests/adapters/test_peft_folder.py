"""PEFT folders: read, written back and merged as by PEFT, for families whose layouts differ."""

import json

import numpy as np
import pytest

from maxtext.adapters.merge import merge_folder, merged_weight
from maxtext.adapters.modules import ModelModules
from maxtext.adapters.peft_folder import read_adapter, to_peft, write_adapter
from maxtext.adapters.spec import Adapter, adapter_spec
from maxtext.checkpoint.open import open_checkpoint
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.sources import from_python
from maxtext.inference.llm import LLM
from maxtext.inference.loading import resolve_config
from maxtext.layers.adapters import AdapterSpec, AdapterTarget
from maxtext.models.configuration import load
from maxtext.models.transformer import build_context, make_template

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "Llama": dict(tie_word_embeddings=False),
    "Phi3": dict(),
    "Qwen3": dict(tie_word_embeddings=True, head_dim=4),
    "Gemma2": dict(head_dim=4, query_pre_attn_scalar=4),
    "Cohere": dict(logit_scale=0.25),
    "Mixtral": dict(num_local_experts=3, num_experts_per_tok=2),
    "DeepseekV3": dict(
        moe_intermediate_size=8, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=6, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4, first_k_dense_replace=1, num_key_value_heads=4,
    ),
    "Qwen3Next": dict(
        head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=6, num_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=12,
    ),
}  # fmt: skip
VARIANTS = {
    "lora": ("Llama", dict(target_modules=["q_proj", "v_proj", "down_proj"])),
    "dora": ("Llama", dict(target_modules=["k_proj", "o_proj", "up_proj"], use_dora=True)),
    "patterns": (
        "Llama",
        dict(
            target_modules=["q_proj", "v_proj"], use_rslora=True, rank_pattern={"v_proj": 3},
            alpha_pattern={r"layers\.1\.self_attn\.v_proj": 7},
        ),
    ),
    "one layer": ("Llama", dict(target_modules=["q_proj"], layers_to_transform=[1])),
    "saved head": ("Llama", dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "head of a tied model": (
        "Qwen3", dict(target_modules=["q_proj"], modules_to_save=["lm_head"])
    ),
    "embedding of a tied model": (
        "Qwen3", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    ),
    "outside layers": ("Llama", dict(target_modules=["embed_tokens", "lm_head"])),
    "fused": ("Phi3", dict(target_modules=["qkv_proj", "gate_up_proj"])),
    "fused dora": ("Phi3", dict(target_modules=["qkv_proj", "o_proj"], use_dora=True)),
    "latent attention": (
        "DeepseekV3",
        dict(
            target_modules=[
                "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
            ],
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of tiny models by family, created when they are asked for."""
    folders = {}

    def base(family):
        if family not in folders:
            torch.manual_seed(0)
            config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family]))
            folder = tmp_path_factory.mktemp(family)
            getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
            folders[family] = folder
        return folders[family]

    return base


def settings_of(folder, **keys):
    return resolve_config(from_python(keys), open_checkpoint(folder))


def tensors(folder, stem="model"):
    from safetensors.numpy import load_file

    return load_file(folder / f"{stem}.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_is_merged_and_written_back_as_by_peft(variant, bases, tmp_path):
    peft = pytest.importorskip("peft")
    family, options = VARIANTS[variant]
    base = bases(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=10, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                factor = torch.randn(weight.shape, generator=generator) * 0.2
                weight.copy_(weight.abs() * (1 + factor) if "magnitude" in name else factor)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload().state_dict()
    merge_folder(base, tmp_path / "adapter", tmp_path / "merged")
    result = tensors(tmp_path / "merged")
    before = tensors(base)
    assert result.keys() == before.keys() | ({"lm_head.weight"} if lora.modules_to_save else set())
    settings = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert settings.get("tie_word_embeddings", False) == ("lm_head.weight" not in result)
    assert any(not np.array_equal(result[name], before[name]) for name in before)
    for name, tensor in result.items():
        if name in merged:
            np.testing.assert_allclose(tensor, merged[name], rtol=1e-5, atol=1e-6, err_msg=name)
    config = settings_of(base)
    adapter = read_adapter(tmp_path / "adapter", config)
    write_adapter(tmp_path / "back", adapter, config)
    original = tensors(tmp_path / "adapter", "adapter_model")
    original = {name: array for name, array in original.items() if "base_layer" not in name}
    written = tensors(tmp_path / "back", "adapter_model")
    assert written.keys() == original.keys()
    for name, array in original.items():
        assert array.dtype == written[name].dtype
        np.testing.assert_array_equal(array, written[name], err_msg=name)


TIED_VARIANTS = {
    "embedding": ("Qwen3", dict(target_modules=["embed_tokens", "q_proj"])),
    "embedding, scaled": ("Gemma2", dict(target_modules=["embed_tokens"])),
    "embedding, scaled logits": ("Cohere", dict(target_modules=["embed_tokens"])),
    "embedding and saved head": (
        "Qwen3", dict(target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"])
    ),
    "saved embedding": ("Qwen3", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"])),
    "saved head, DoRA": (
        "Qwen3", dict(target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=True)
    ),
    "both saved": (
        "Gemma2", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    ),
}  # fmt: skip


def peft_adapter_and_logits(base, folder, ids, options, **saving):
    """Write a random adapter of a base, and compute PEFT's logits without merging it."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                factor = torch.randn(weight.shape, generator=generator) * 0.3
                weight.copy_(weight.abs() * (1 + factor) if "magnitude" in name else factor)
    model.save_pretrained(folder, **saving)
    base_model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return torch_logits(peft.PeftModel.from_pretrained(base_model, folder), ids)


def torch_logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("variant", TIED_VARIANTS)
def test_merging_changes_only_the_part_of_a_tied_model_that_the_adapter_is_of(
    variant, bases, tmp_path
):
    family, options = TIED_VARIANTS[variant]
    base, ids = bases(family), np.random.default_rng(0).integers(3, 67, (2, 12))
    expected = peft_adapter_and_logits(base, tmp_path / "adapter", ids, options)
    merge_folder(base, tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(torch_logits(merged, ids), expected, atol=2e-5)
    settings = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert settings["tie_word_embeddings"] is False
    assert "lm_head.weight" in tensors(tmp_path / "merged")


def test_a_tied_model_is_served_merged_and_saved_as_by_peft(bases, tmp_path):
    """Merged in memory and in a folder, with and without the base's embedding in the adapter."""
    base, ids = bases("Qwen3"), np.random.default_rng(0).integers(3, 67, (2, 12))
    options = dict(target_modules=["embed_tokens", "q_proj"])
    expected = peft_adapter_and_logits(
        base, tmp_path / "adapter", ids, options, save_embedding_layers=False
    )
    llm = LLM.load(
        base, adapters=[tmp_path / "adapter"], dtype="float32", weight_dtype="float32",
        matmul_precision="highest",
    )  # fmt: skip
    np.testing.assert_allclose(llm.logits(ids), expected, atol=2e-5)
    merged = llm.merge()
    np.testing.assert_allclose(merged.logits(ids), expected, atol=2e-5)
    merged.save_hf(tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    np.testing.assert_allclose(torch_logits(saved, ids), expected, atol=2e-5)


def test_a_head_that_was_a_normalized_embedding_has_its_scale_in_the_weight(tmp_path):
    """normalize_embedding_logits divides the logits of a tied model alone, by √E."""
    keys = {
        "base_emb_dim": 16, "base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": 8,
        "base_mlp_dim": 24, "base_num_decoder_layers": 1, "vocab_size": 67, "dtype": "float32",
        "logits_via_embedding": True, "max_target_length": 32, "matmul_precision": "highest",
    }  # fmt: skip
    ids, random = np.random.default_rng(0).integers(3, 67, (2, 12)), np.random.default_rng(1)
    llm = LLM.from_config(load(None, from_python(keys)))
    assert llm.config.normalize_embedding_logits
    shapes = {"embedder/lora_a": (67, 2), "embedder/lora_b": (2, 16)}
    factors = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    spec = AdapterSpec((("embedder", AdapterTarget(2, 2.0)),))
    llm.add_adapter("new", Adapter(spec, {k: v.astype("float32") for k, v in factors.items()}))
    served = llm.logits(ids)
    np.testing.assert_allclose(llm.merge().logits(ids), served, atol=2e-5)


def test_multimodal_model_has_the_names_of_its_own_modules(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=SIZES | {"head_dim": 4}, vision_config=vision, mm_tokens_per_image=4
    )
    base = tmp_path / "base"
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(base)
    llm = LLM.load(base, dtype="float32", weight_dtype="float32")
    paths = ["layers/0/attention/query", "layers/1/mlp/wo"]
    random = np.random.default_rng(0)
    shapes = {"layers/0/attention/query": (16, (4, 4)), "layers/1/mlp/wo": (24, (16,))}
    arrays = {}
    for path, (inputs, outputs) in shapes.items():
        arrays[f"{path}/lora_a"] = random.standard_normal((inputs, 2)).astype("float32")
        arrays[f"{path}/lora_b"] = random.standard_normal((2, *outputs)).astype("float32")
    targets = tuple((path, AdapterTarget(2, 2.0)) for path in paths)
    llm.add_adapter("new", Adapter(AdapterSpec(targets), arrays))
    llm.save_adapter(tmp_path / "adapter", "new")
    ids = np.arange(3, 12)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(llm.logits(ids), expected, atol=1e-4)
    assert np.abs(expected - llm.logits(ids, adapter="")).max() > 0.01


def write_folder(folder, arrays, **settings):
    from safetensors.numpy import save_file

    folder.mkdir()
    named = {f"base_model.model.{name}": array for name, array in arrays.items()}
    save_file(named, folder / "adapter_model.safetensors")
    defaults = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["w1", "w2"]}
    (folder / "adapter_config.json").write_text(json.dumps(defaults | settings))
    return folder


def factors(module, inputs, outputs, rank=2, seed=0):
    random = np.random.default_rng(seed)
    return {
        f"{module}.lora_A.weight": random.standard_normal((rank, inputs)).astype("float32"),
        f"{module}.lora_B.weight": random.standard_normal((outputs, rank)).astype("float32"),
    }


def test_experts_are_stacked_in_the_order_of_their_numbers(bases, tmp_path):
    base = bases("Mixtral")
    modules = {
        f"model.layers.1.block_sparse_moe.experts.{expert}.{name}": sizes
        for expert in range(3)
        for name, sizes in (("w1", (16, 24)), ("w2", (24, 16)))
    }
    arrays = {}
    for seed, (module, (inputs, outputs)) in enumerate(modules.items()):
        arrays |= factors(module, inputs, outputs, seed=seed)
    folder = write_folder(tmp_path / "adapter", arrays)
    config = settings_of(base)
    adapter = read_adapter(folder, config)
    linears = ModelModules.of(config).linears
    for name, path in (("w1", "layers/1/mlp/experts/wi_0"), ("w2", "layers/1/mlp/experts/wo")):
        shape = linears[path]
        zeros = np.zeros((*shape.batch, *shape.inputs, *shape.outputs), np.float32)
        update = merged_weight(adapter, path, zeros, shape)
        for expert in range(3):
            module = f"model.layers.1.block_sparse_moe.experts.{expert}.{name}"
            a, b = arrays[f"{module}.lora_A.weight"], arrays[f"{module}.lora_B.weight"]
            np.testing.assert_allclose(update[expert], 3 * (b @ a).T, rtol=1e-5)
    written, settings = to_peft(adapter, ModelModules.of(config), "")
    assert settings["r"] == 2
    assert {name: array.tobytes() for name, array in written.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    ("family", "keys"), [(family, {}) for family in FAMILIES] + [("Llama", {"fused_qkv": True})]
)
def test_native_factors_have_the_product_of_the_modules_factors(family, keys, bases):
    """B A of the HF modules, as the tensor rule arranges a weight, is lora_a lora_b."""
    random = np.random.default_rng(0)
    for binding in ModelModules.of(settings_of(bases(family), **keys)).of_modules:
        factors = [
            (
                random.standard_normal(a).astype("float32"),
                random.standard_normal(b).astype("float32"),
            )
            for a, b in binding.hf_shapes(2)
        ]
        shapes = binding.shapes.items()
        bound = binding.bind({path: (*s.batch, *s.inputs, *s.outputs) for path, s in shapes})
        updates = bound.to_native([b @ a for a, b in factors])
        native = binding.to_native(factors)
        for update, (path, (a, b)) in zip(updates, native.items(), strict=True):
            shape, rank = binding.shapes[path], a.shape[-1]
            product = a.reshape(*shape.batch, -1, rank) @ b.reshape(*shape.batch, rank, -1)
            np.testing.assert_allclose(product.reshape(update.shape), update, rtol=1e-4, atol=1e-5)
        written = binding.to_hf(native)
        for (a, b), (a_written, b_written) in zip(factors, written, strict=True):
            np.testing.assert_allclose(b_written @ a_written, b @ a, rtol=1e-4, atol=1e-5)


def test_layers_of_one_module_with_different_factors_are_written_as_blocks(bases, tmp_path):
    """query, key and value of Phi-3 were trained apart; PEFT has one qkv_proj."""
    config = settings_of(bases("Phi3"))
    modules = ModelModules.of(config)
    paths = [f"layers/0/attention/{name}" for name in ("query", "value")]
    spec = AdapterSpec(tuple((path, AdapterTarget(2, 6.0)) for path in paths))
    random = np.random.default_rng(0)
    native = {}
    for path in paths:
        shape = modules.linears[path]
        for kind, size in (("lora_a", (*shape.inputs, 2)), ("lora_b", (2, *shape.outputs))):
            native[f"{path}/{kind}"] = random.standard_normal(size).astype("float32")
    adapter = Adapter(spec, native)
    write_adapter(tmp_path / "adapter", adapter, config)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["lora_alpha"] / settings["r"] == 3
    again = read_adapter(tmp_path / "adapter", config)
    for path in paths:
        shape = modules.linears[path]
        zeros = np.zeros((*shape.inputs, *shape.outputs), np.float32)
        expected = merged_weight(adapter, path, zeros, shape)
        np.testing.assert_allclose(
            merged_weight(again, path, zeros, shape), expected, rtol=1e-5, atol=1e-6
        )
    key = modules.linears["layers/0/attention/key"]
    zeros = np.zeros((*key.inputs, *key.outputs), np.float32)
    assert not merged_weight(again, "layers/0/attention/key", zeros, key).any()


def test_layers_of_one_module_share_a_factor(bases):
    modules = ModelModules.of(settings_of(bases("Phi3")))
    groups = [("query", "key", "value"), ("wi_0", "wi_1")]
    attention, mlp = ([f"layers/0/{part}/{name}" for name in names] for part, names in
                      zip(("attention", "mlp"), groups, strict=True))  # fmt: skip
    paths = [*attention, *mlp, "layers/0/mlp/wo"]
    assert set(map(frozenset, modules.shared_layers(paths))) == {
        frozenset(attention),
        frozenset(mlp),
    }
    assert modules.shared_layers(["layers/0/mlp/wo"]) == ()
    assert modules.shared_layers(paths[1:]) == ()  # query has none
    assert ModelModules.of(settings_of(bases("Llama"))).shared_layers(paths) == ()
    spec = AdapterSpec((), shared=modules.shared_layers(paths))
    first = spec.shared[0][0]
    assert spec.source([first]) is None
    assert spec.source([spec.shared[0][1]]) == first.rpartition("/")[2]


def test_fused_layer_has_the_adapters_of_its_modules(bases, tmp_path):
    base = bases("Llama")
    arrays = factors("model.layers.0.self_attn.q_proj", 16, 16)
    arrays |= factors("model.layers.0.self_attn.v_proj", 16, 8, seed=1)
    folder = write_folder(tmp_path / "adapter", arrays, target_modules=["q_proj", "v_proj"])
    config = settings_of(base, fused_qkv=True)
    adapter = read_adapter(folder, config)
    modules = ModelModules.of(config)
    path = "layers/0/attention/qkv"
    shape = modules.linears[path]
    zeros = np.zeros((*shape.inputs, *shape.outputs), np.float32)
    update = merged_weight(adapter, path, zeros, shape)  # [E, K, G + 2, D]
    query, value = (
        3 * arrays[f"model.layers.0.self_attn.{name}.lora_B.weight"]
        @ arrays[f"model.layers.0.self_attn.{name}.lora_A.weight"]
        for name in ("q_proj", "v_proj")
    )  # fmt: skip
    np.testing.assert_allclose(update[:, :, :2].reshape(16, 16), query.T, rtol=1e-4, atol=1e-5)
    assert not update[:, :, 2].any()
    np.testing.assert_allclose(update[:, :, 3].reshape(16, 8), value.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_tree_of_a_model_gives_the_adapter_back(scan, bases, tmp_path):
    arrays = factors("model.layers.0.self_attn.q_proj", 16, 16)
    arrays |= factors("model.layers.1.self_attn.q_proj", 16, 16, rank=3, seed=1)
    folder = write_folder(
        tmp_path / "adapter", arrays, target_modules=["q_proj"],
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 3},
    )  # fmt: skip
    config = settings_of(bases("Llama"), scan_layers=scan)
    adapter = read_adapter(folder, config)
    template = make_template(config, build_context(config, adapters=adapter.spec))
    tree = adapter.tree(template, config)
    again = Adapter.from_tree(adapter.spec, tree, template, config)
    assert again.tensors.keys() == adapter.tensors.keys()
    for name, array in adapter.tensors.items():
        np.testing.assert_array_equal(array, again.tensors[name])


def test_problems_name_the_tensor(bases, tmp_path):
    config = settings_of(bases("Llama"))
    arrays = factors("model.layers.0.self_attn.q_proj", 16, 20)
    folder = write_folder(tmp_path / "shape", arrays, target_modules=["q_proj"])
    with pytest.raises(UserError, match=r"q_proj.lora_B.weight has shape \[20, 2\]"):
        read_adapter(folder, config)
    folder = write_folder(tmp_path / "rank", arrays, r=4, target_modules=["q_proj"])
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight has shape \[2, 16\]"):
        read_adapter(folder, config)
    arrays = factors("model.layers.0.attn.c_attn", 16, 16)
    folder = write_folder(tmp_path / "module", arrays, target_modules=["c_attn"])
    with pytest.raises(UserError, match="c_attn.lora_A.weight is of a module that the model lacks"):
        read_adapter(folder, config)
    arrays = {"model.norm.weight": np.ones(16, "float32")}
    saved = write_folder(tmp_path / "norm", arrays, modules_to_save=["norm"])
    with pytest.raises(UserError, match="model.norm.weight is saved in full, which is supported"):
        read_adapter(saved, config)
    head = write_folder(tmp_path / "head", factors("lm_head", 16, 67), target_modules=["lm_head"])
    with pytest.raises(UserError, match="is of a head that is the model's embedding"):
        read_adapter(head, settings_of(bases("Qwen3")))
    with pytest.raises(UserError, match="it is no PEFT adapter"):
        read_adapter(tmp_path, config)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="module has no weights: neither adapter_model.safetensors"):
        read_adapter(folder, config)


def test_tied_changes_of_head_and_embedding_are_refused(bases, tmp_path):
    arrays = {"model.embed_tokens.weight": np.ones((67, 16), "float32")}
    folder = write_folder(
        tmp_path / "tied", arrays, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    with pytest.raises(UserError, match="ensure_weight_tying=true changes the head"):
        read_adapter(folder, settings_of(bases("Qwen3")))


def spec_of(model_name, **keys):
    run = {"model_name": model_name, "max_target_length": 32, "per_device_batch_size": 1}
    config = load(None, from_python(run))
    return adapter_spec(config.model_copy(update={"lora_rank": 4} | keys))


def last_names(spec):
    return {path.split("/", 2)[2] for path, _ in spec.targets}


def test_default_targets_are_projections_of_attention_and_mlps():
    attention = {"attention/query", "attention/key", "attention/value", "attention/out"}
    assert last_names(spec_of("llama3.1-8b")) == attention | {"mlp/wi_0", "mlp/wi_1", "mlp/wo"}
    latent = {f"attention/{name}" for name in ("query_a", "query_b", "kv_a", "kv_b", "out")}
    shared = {f"mlp/shared/{name}" for name in ("wi_0", "wi_1", "wo")}
    dense = {"mlp/wi_0", "mlp/wi_1", "mlp/wo"}
    assert last_names(spec_of("deepseek3-tiny")) == latent | shared | dense


def test_keys_select_and_scale_targets():
    spec = spec_of("llama3.1-8b", lora_target_modules=["q_proj", "down_proj"], lora_alpha=12.0)
    assert last_names(spec) == {"attention/query", "mlp/wo"}
    assert {spec.scale(target) for _, target in spec.targets} == {3.0}
    spec = spec_of("llama3.1-8b", lora_module_path="layers/[01]/mlp/.*", lora_use_rslora=True)
    assert {path for path, _ in spec.targets} == {
        f"layers/{layer}/mlp/{name}" for layer in (0, 1) for name in ("wi_0", "wi_1", "wo")
    }
    assert {spec.scale(target) for _, target in spec.targets} == {2.0}
    every = spec_of("mixtral-8x7b", lora_target_modules="all-linear")
    assert not any("experts" in path or path == "head" for path, _ in every.targets)
    routed = spec_of("mixtral-8x7b", lora_target_modules=["w1"])
    assert last_names(routed) == {"mlp/experts/wi_0"}
    assert spec_of("llama3.1-8b", lora_rank=0) is None


def test_targets_that_select_nothing_are_refused_with_near_names():
    with pytest.raises(ConfigError, match=r"\['qproj'\] selects no module.*q_proj"):
        spec_of("llama3.1-8b", lora_target_modules=["qproj", "v_proj"])
    with pytest.raises(ConfigError, match="matches no layer; the paths are .*attention/query"):
        spec_of("llama3.1-8b", lora_module_path="decoder/.*")


def test_dora_of_routed_experts_is_refused():
    with pytest.raises(ConfigError, match="no magnitudes for routed experts .*layers/0/mlp"):
        spec_of("mixtral-8x7b", lora_target_modules=["w1"], lora_use_dora=True)


def test_experts_that_are_no_modules_are_targets_by_their_native_paths():
    spec = spec_of("gpt-oss-20b", lora_module_path=r"layers/\d+/mlp/(experts/.*|router)")
    assert last_names(spec) == {
        f"mlp/{name}" for name in ("experts/wi_0", "experts/wi_1", "experts/wo", "router")
    }
