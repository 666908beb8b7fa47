"""Adapters of experts and routers, which are parameters in transformers 5: read from folders of
PEFT, merged, and written for PEFT."""

import json
import re

import numpy as np
import pytest

from maxtext.adapters.merge import merge_folder
from maxtext.adapters.modules import ModelModules
from maxtext.adapters.peft_folder import read_adapter, to_peft, write_adapter
from maxtext.adapters.spec import Adapter
from maxtext.checkpoint.open import open_checkpoint
from maxtext.common.errors import UserError
from maxtext.configs.sources import from_python
from maxtext.inference.llm import LLM
from maxtext.inference.loading import resolve_config
from maxtext.layers.adapters import AdapterSpec, AdapterTarget

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("light_compiler")

SIZES = dict(
    vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, num_local_experts=3, num_experts_per_tok=2,
)  # fmt: skip
LATENT = dict(
    moe_intermediate_size=8, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
    q_lora_rank=8, kv_lora_rank=6, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    first_k_dense_replace=1, num_key_value_heads=4,
)  # fmt: skip
# The class in transformers, its options, and the last name of its router.
FAMILIES = {
    "mixtral": ("Mixtral", {}, "gate.weight"),
    "qwen3": (
        "Qwen3Moe",
        dict(num_experts=3, moe_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=[0]),
        "gate.weight",
    ),
    "deepseek3": ("DeepseekV3", LATENT, "gate.weight"),
    "gpt-oss": ("GptOss", {}, "router.weight"),
    "llama4": (
        "Llama4",
        dict(num_experts_per_tok=1, intermediate_size_mlp=20, attention_chunk_size=7),
        "router.weight",
    ),
    "gemma4": (
        "Gemma4",
        dict(
            enable_moe_block=True, num_experts=3, top_k_experts=2, moe_intermediate_size=8,
            hidden_size_per_layer_input=0, vocab_size_per_layer_input=67, global_head_dim=4,
        ),
        "router.proj.weight",
    ),
}  # fmt: skip
IDS = np.arange(3, 12)[None]
EXACT = {"dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest"}
EXPERTS = r"layers/\d+/(mlp/)?(sparse/)?experts/"


def every(*case):
    """A case of the whole matrix, which extends the representative ones."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of tiny models by family, created when they are asked for."""
    folders = {}

    def base(family):
        if family not in folders:
            torch.manual_seed(0)
            name, options, _ = FAMILIES[family]
            kind = name if hasattr(transformers, f"{name}ForCausalLM") else f"{name}Text"
            text = f"{name}Text" if hasattr(transformers, f"{name}TextConfig") else name
            config = getattr(transformers, f"{text}Config")(**(SIZES | options))
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim > 1:
                        weight.copy_(torch.randn_like(weight) * 0.2)
            folders[family] = tmp_path_factory.mktemp(family) / "base"
            model.save_pretrained(folders[family])
        return folders[family]

    return base


def torch_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def torch_logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(IDS), use_cache=False).logits.numpy()


def peft_adapter(base, folder, seed=0, **options):
    """Write an adapter of PEFT with random values; returns the model."""
    config = peft.LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(torch_model(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return model


def tensors(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")


def write_tensors(folder, arrays, settings):
    from safetensors.numpy import save_file

    folder.mkdir()
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(arrays, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def config_of(base):
    return resolve_config(from_python(EXACT), open_checkpoint(base))


def random_adapter(config, pattern, rank=2, **options):
    """Random factors for the native layers that a pattern matches."""
    linears = ModelModules.of(config).linears
    random, arrays, targets = np.random.default_rng(0), {}, []
    for path, shape in linears.items():
        if re.fullmatch(pattern, path):
            targets.append((path, AdapterTarget(rank, 6.0)))
            for kind, size in (
                ("lora_a", (*shape.batch, *shape.inputs, rank)),
                ("lora_b", (*shape.batch, rank, *shape.outputs)),
            ):
                arrays[f"{path}/{kind}"] = random.normal(0, 0.3, size).astype("float32")
    return Adapter(AdapterSpec(tuple(targets), **options), arrays)


@pytest.mark.parametrize(
    "family",
    [
        family if family in ("mixtral", "gpt-oss", "llama4") else every(family)
        for family in FAMILIES
    ],
)
def test_folder_of_peft_is_read_merged_and_written_back(family, bases, tmp_path):
    base, router = bases(family), FAMILIES[family][2]
    parameters = ["experts.gate_up_proj", "experts.down_proj", router]
    model = peft_adapter(
        base, tmp_path / "adapter", target_modules=["o_proj"], target_parameters=parameters,
        rank_pattern={r".*\.gate_up_proj": 3}, alpha_pattern={"experts.down_proj": 5},
    )  # fmt: skip
    expected = torch_logits(model)
    llm = LLM.load(base, adapters=[tmp_path / "adapter"], **EXACT)
    np.testing.assert_allclose(llm.logits(IDS), expected, atol=2e-4)
    assert np.abs(expected - llm.logits(IDS, adapter="")).max() > 0.1
    merge_folder(base, tmp_path / "adapter", tmp_path / "merged")
    np.testing.assert_allclose(torch_logits(torch_model(tmp_path / "merged")), expected, atol=2e-4)
    llm.save_adapter(tmp_path / "back", "adapter")
    original, written = tensors(tmp_path / "adapter"), tensors(tmp_path / "back")
    assert written.keys() == original.keys()
    for name, array in original.items():
        np.testing.assert_array_equal(array, written[name], err_msg=name)


@pytest.mark.parametrize(
    ("family", "pattern", "options"),
    [
        ("mixtral", rf"{EXPERTS}.*|.*/attention/.*|.*/router", {}),
        every("mixtral", f"{EXPERTS}wi_.", {}),
        ("mixtral", f"{EXPERTS}wi_0", {}),
        ("mixtral", "layers/0/mlp/experts/.*|layers/1/mlp/experts/wo", {"rslora": True}),
        every("qwen3", ".*/mlp/.*", {}),
        ("deepseek3", ".*/mlp/.*|.*/attention/.*", {"dropout": 0.1}),
        every("deepseek3", ".*/shared/.*", {}),
        every("gpt-oss", f"{EXPERTS}.*|.*/attention/query", {}),
        ("llama4", ".*/mlp/.*", {}),
        every("gemma4", ".*experts/.*|.*/router", {}),
    ],
)
def test_peft_loads_what_is_written(family, pattern, options, bases, tmp_path):
    base = bases(family)
    llm = LLM.load(base, **EXACT)
    adapter = random_adapter(llm.config, pattern, **options)
    llm.add_adapter("new", adapter)
    llm.save_adapter(tmp_path / "adapter", "new")
    expected = torch_logits(peft.PeftModel.from_pretrained(torch_model(base), tmp_path / "adapter"))
    np.testing.assert_allclose(llm.logits(IDS, adapter="new"), expected, atol=2e-4)
    assert np.abs(expected - llm.logits(IDS, adapter="")).max() > 0.1
    again = read_adapter(tmp_path / "adapter", llm.config)
    for name, array in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], array, err_msg=name)
    for path, target in adapter.spec.targets:
        assert again.spec.scale(again.spec.by_path[path]) == pytest.approx(
            adapter.spec.scale(target)
        )
        assert again.spec.by_path[path].rank == target.rank


def test_all_linear_has_the_logits_of_peft(bases, tmp_path):
    base = bases("mixtral")
    model = peft_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "gate.weight" in settings["target_parameters"]
    llm = LLM.load(base, adapters=[tmp_path / "adapter"], **EXACT)
    np.testing.assert_allclose(llm.logits(IDS), torch_logits(model), atol=2e-4)


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_a_single_parameter_has_no_nested_name(parameter, bases, tmp_path):
    base = bases("qwen3")
    peft_adapter(
        base, tmp_path / "adapter", target_modules=[], target_parameters=[f"experts.{parameter}"]
    )
    assert not any("base_layer" in name for name in tensors(tmp_path / "adapter"))
    adapter = read_adapter(tmp_path / "adapter", config_of(base))
    branches = {"gate_up_proj": {"wi_0", "wi_1"}, "down_proj": {"wo"}}[parameter]
    assert {path for path, _ in adapter.spec.targets} == {
        f"layers/1/mlp/experts/{branch}" for branch in branches
    }


def test_factors_of_early_peft_are_not_exchanged(bases, tmp_path):
    """Llama 4's parameters are [X, in, out]. Today's PEFT exchanges A and B for them."""
    config = config_of(bases("llama4"))
    adapter = random_adapter(config, "layers/1/mlp/experts/wo")
    arrays, settings = to_peft(adapter, ModelModules.of(config), "")
    name = "model.layers.1.feed_forward.experts.lora_"
    a_XrO = arrays[f"{name}A.weight"].reshape(3, 2, 16)
    b_IrX = arrays[f"{name}B.weight"].reshape(24, 2, 3)
    early = {
        f"base_model.model.{name}A.weight": b_IrX.transpose(2, 1, 0).reshape(6, 24),
        f"base_model.model.{name}B.weight": a_XrO.transpose(2, 1, 0).reshape(16, 6),
    }
    write_tensors(tmp_path / "early", early, settings)
    again = read_adapter(tmp_path / "early", config)
    for path, array in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[path], array)


def test_misfits_are_refused_in_one_sentence(bases, tmp_path):
    base = bases("gpt-oss")
    config = config_of(base)
    both = ["experts.gate_up_proj", "experts.down_proj"]
    peft_adapter(base, tmp_path / "adapter", target_modules=[], target_parameters=both)
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    for change, part in (
        ({"target_parameters": both[:1]}, r"adapters of 2 parameters, and .* selects 1 of gate_up"),
        ({"r": 3}, r"gate_up_proj has factors \[6, 16\] and \[48, 6\], .* need \[9, 16\] and"),
        ({"use_dora": True}, "use_dora=true is not supported with target_parameters"),
    ):
        path.write_text(json.dumps(settings | change))
        with pytest.raises(UserError, match=part):
            read_adapter(tmp_path / "adapter", config)
    peft_adapter(
        base, tmp_path / "biases", target_modules=[],
        target_parameters=["experts.gate_up_proj_bias", "experts.down_proj"],
    )  # fmt: skip
    with pytest.raises(UserError, match=r"adapters of 2 parameters, and .* selects 1 of"):
        read_adapter(tmp_path / "biases", config)


def test_existing_folder_keeps_its_modules(bases, tmp_path):
    """Modules of single experts, as PEFT wrote them before transformers 5, are written so again."""
    config = config_of(bases("mixtral"))
    adapter = random_adapter(config, f"{EXPERTS}wo")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["w2"]}
    modules = Adapter(adapter.spec, adapter.tensors, settings=settings)
    write_adapter(tmp_path / "adapter", modules, config)
    names = tensors(tmp_path / "adapter")
    assert "base_model.model.model.layers.1.block_sparse_moe.experts.2.w2.lora_A.weight" in names
    again = read_adapter(tmp_path / "adapter", config)
    for path, array in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[path], array)
