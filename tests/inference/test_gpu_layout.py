"""Models built for inference on one GPU, on a CPU with interpreted kernels: merged and transposed
weights, and decode steps by GEMV kernels, against the reference implementations.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from maxtext import LLM
from maxtext.common.trees import flatten_dict
from maxtext.configs.sources import from_python
from maxtext.inference.loading import inference_context, resolve_config
from maxtext.kernels.decode import gemv
from maxtext.kernels.decode.tiles import Tiles
from maxtext.layers import decoder_layer
from maxtext.layers.block import Block
from maxtext.layers.weight_layout import leaf_layouts
from maxtext.models.transformer import implementations
from tests.layers.gpu_context import interpreted_kernels

TINY = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 48,
    "base_num_decoder_layers": 1,
    "vocab_size": 64,
    "max_target_length": 16,
    "dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def load(keys, platform="cpu"):
    keys = {key: value for key, value in keys.items() if value is not None}
    config = resolve_config(from_python(keys | {"model_name": "default"}))
    llm = LLM.from_config(config)
    if platform == "cpu":
        return llm
    context = inference_context(config, llm.rules)
    return LLM.from_config(config, context=replace(context, platform=platform, capability="9.0"))


# Keys, and how many arrays are merged: queries, keys and values; gate and up.
MERGED = {
    "llama": ({"decoder_block": "llama2"}, 2),
    "biases": ({"decoder_block": "llama2", "attention_bias": True}, 3),
    "shared keys": (
        {
            "decoder_block": "gemma4",
            "base_num_decoder_layers": 2,
            "architecture": {"layer_kinds": ["sliding", "full"]},
            "share_kv_projections": True,
            "sliding_window_size": 8,
        },
        4,
    ),
    "experts": ({"decoder_block": "mixtral", **EXPERTS}, 1),
    "scanned": ({"decoder_block": "llama2", "scan_layers": True}, 0),
    "int8": ({"decoder_block": "llama2", "quantization": "int8"}, 5),
    "int4": ({"decoder_block": "llama2", "quantization": "int4"}, 5),
    "fp8": ({"decoder_block": "mixtral", "quantization": "fp8", **EXPERTS}, 3),
}


@pytest.mark.parametrize(("keys", "count"), MERGED.values(), ids=list(MERGED))
def test_merged_weights(keys, count):
    plain, merged = load(TINY | keys), load(TINY | keys, "gpu")
    layouts = leaf_layouts(merged.programs.template).values()
    assert sum(layout is not None for layout in layouts) == count
    ids = np.random.default_rng(0).integers(0, 64, (2, 12))
    np.testing.assert_allclose(merged.logits(ids), plain.logits(ids), atol=1e-5)
    unpacked = merged.model.checkpoint_weights
    assert jax.tree.structure(unpacked) == jax.tree.structure(plain.weights)
    jax.tree.map(np.testing.assert_array_equal, unpacked, plain.weights)


@pytest.mark.slow
def test_generate_and_save(tmp_path):
    plain, merged = load(TINY), load(TINY, "gpu")
    ids = np.random.default_rng(0).integers(0, 64, (2, 12))
    np.testing.assert_array_equal(
        merged.generate(ids, max_new_tokens=4), plain.generate(ids, max_new_tokens=4)
    )
    merged.save(tmp_path / "saved")
    saved = LLM.load(tmp_path / "saved", dtype="float32", matmul_precision="highest")
    jax.tree.map(np.testing.assert_array_equal, saved.weights, plain.weights)


SINGLE = TINY | {
    "base_emb_dim": 512,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "base_mlp_dim": 512,
    "dtype": "bfloat16",
    "weight_dtype": "bfloat16",
    "matmul_precision": "default",
    "use_ragged_attention": True,
}
ALL = {"norm_qkv_rope", "norm_gate_up", "gemv_add", "gemv"}
SPLIT = {"norm_gemv", "split_qkv"}
POST_NORMS = {
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "sliding_window_size": 16,
}
FAMILIES = {
    "llama": ({"decoder_block": "llama2"}, ALL),
    "QK norm": (
        {"decoder_block": "qwen3", "use_qk_norm": True},
        SPLIT | ALL - {"norm_qkv_rope"},
    ),
    "experts": (
        {
            "decoder_block": "qwen3_moe",
            "use_qk_norm": True,
            "base_mlp_dim": None,
            "base_moe_mlp_dim": 64,
            **EXPERTS,
        },
        SPLIT | {"gemv_add", "gemv", "select_experts", "expert_matmul"},
    ),
    "tied, gelu": ({"decoder_block": "gemma", "logits_via_embedding": True}, ALL - {"gemv"}),
    "post-norms": ({"decoder_block": "gemma2", **POST_NORMS}, ALL - {"gemv_add"}),
    "one branch, biases": ({"decoder_block": "gpt3"}, {"gemv", "split_qkv"}),
    "int8 cache": ({"decoder_block": "llama2", "quantize_kvcache": True}, ALL),
    "float32": ({"decoder_block": "llama2", "dtype": "float32"}, {"split_qkv"}),
    "int8": ({"decoder_block": "llama2", "quantization": "int8"}, ALL),
    "fp8": ({"decoder_block": "llama2", "quantization": "fp8"}, ALL),
    "int4": ({"decoder_block": "llama2", "quantization": "int4"}, ALL),
}


@pytest.fixture
def kernels(monkeypatch):
    """The names of the kernels that ran, interpreted with few programs."""
    tiles = dict.fromkeys(gemv.PAIRS, (Tiles(16, 512, 1),) * 2)
    for table in ("PAIRS", "SINGLE"):
        monkeypatch.setattr(gemv, table, tiles)
    with interpreted_kernels() as names:
        yield names


def check_greedy(prompts, keys):
    """Each token has the largest logit of the reference, up to the precision of bfloat16."""
    tokens = load(SINGLE | keys, "gpu").generate(prompts, max_new_tokens=4, ignore_eos=True)
    reference = load(SINGLE | keys | {"use_ragged_attention": None})
    logits = np.asarray(reference.logits(np.concatenate([prompts, tokens], axis=1)), np.float32)
    expected = logits[:, prompts.shape[1] - 1 : -1]
    chosen = np.take_along_axis(expected, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    assert np.all(expected.max(axis=-1) - chosen <= 0.02 * np.abs(expected).max())


@pytest.mark.representative(
    "llama",
    "one branch, biases",
)
@pytest.mark.parametrize(("keys", "expected"), FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.slow
def test_single_row(kernels, keys, expected):
    check_greedy(np.random.default_rng(0).integers(0, 64, (1, 9)), keys)
    others = {"paged_attention", "combine_attention_spans"}
    others |= {f"matmul_{name}" for name in ("int8", "fp8", "int4")}  # of the prefill
    assert kernels - others == expected


@pytest.mark.slow
def test_several_rows(kernels):
    check_greedy(np.random.default_rng(1).integers(0, 64, (3, 7)), {})
    assert "split_qkv" in kernels
    assert not kernels & ALL


FP8_ROWS = {"fp8_quantize_rows", "fp8_norm_quantize_rows", "fp8_gate_quantize_rows"}
FP8_CACHE = {"quantize_kvcache": True, "kv_quant_dtype": "fp8", "kv_quant_axis": "dkv"}
FP8_FAMILIES = {
    "llama": ({"decoder_block": "llama2", **FP8_CACHE}, FP8_ROWS),
    "post-norms": ({"decoder_block": "gemma2", **POST_NORMS}, FP8_ROWS),
    "experts": (
        {"decoder_block": "mixtral", "base_mlp_dim": 64, **EXPERTS},
        FP8_ROWS - {"fp8_gate_quantize_rows"},
    ),
}


@pytest.mark.representative("llama")
@pytest.mark.parametrize(("keys", "expected"), FP8_FAMILIES.values(), ids=list(FP8_FAMILIES))
@pytest.mark.slow
def test_rows_quantized_to_fp8(kernels, monkeypatch, keys, expected):
    """The tokens are those of the plain block, which quantizes the same rows by XLA, unless two
    logits are close."""
    prompts = np.random.default_rng(4).integers(0, 64, (17, 5))

    def generate():
        llm = load(SINGLE | {"quantization": "fp8", **keys}, "gpu")
        return llm.generate(prompts, max_new_tokens=4, ignore_eos=True)

    tokens = generate()
    assert {name for name in kernels if name.startswith("fp8")} == expected
    assert "split_qkv" in kernels
    monkeypatch.setattr(decoder_layer, "BLOCKS", (Block,))
    kernels.clear()
    assert np.mean(tokens == generate()) >= 0.9
    assert not kernels & expected


def test_blocks_for_fp8_weights_are_reported_with_reasons():
    llm = load(SINGLE | {"quantization": "fp8", "decoder_block": "llama2"})
    gpu = replace(inference_context(llm.config, llm.rules), platform="gpu", capability="9.0")

    def chosen(**changes):
        return implementations(llm.config, replace(gpu, **changes))["layers"]

    fewer = "(not GEMV: decodes a single sequence)"
    assert chosen() == f"1 of 1 fp8 decode {fewer}"
    assert chosen(decode_rows=1) == "1 of 1 GEMV"
    for changes in (
        {"capability": "8.0"},
        {"num_devices": 2},
        {"quantized_weights": "int8"},
        {"dtype": "float32"},
        {"scanned": True},
    ):
        assert chosen(**changes) == f"1 of 1 plain {fewer}", changes


EXPERT_SHAPE = {"base_emb_dim": 64, "base_moe_mlp_dim": 32, "num_experts": 6, "scan_layers": False}
EXPERT_FAMILIES = {
    "mixtral": {"decoder_block": "mixtral", "base_mlp_dim": 32, "num_experts_per_tok": 2},
    "limits, biases, sinks": {
        "base_mlp_dim": None,
        "decoder_block": "gpt_oss",
        "num_experts_per_tok": 4,
        "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": 7.0,
        "mlp_bias": True,
        "routed_bias": True,
        "attention_bias": True,
        "attention_sink": True,
        "base_num_decoder_layers": 2,
        "sliding_window_size": 16,
    },
    "shared experts": {
        "decoder_block": "deepseek",
        "num_experts_per_tok": 3,
        "shared_experts": 1,
        "first_num_dense_layers": 1,
        "base_num_decoder_layers": 2,
    },
    "router weights on inputs": {
        "base_mlp_dim": None,
        "decoder_block": "llama4",
        "num_experts_per_tok": 1,
        "chunk_attn_window_size": 16,
    },
}


@pytest.mark.representative("mixtral", "limits, biases, sinks")
@pytest.mark.parametrize("keys", EXPERT_FAMILIES.values(), ids=list(EXPERT_FAMILIES))
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_experts(kernels, keys, rows):
    prompts = np.random.default_rng(3).integers(0, 64, (rows, 7))
    check_greedy(prompts, EXPERT_SHAPE | keys)
    assert "expert_matmul" in kernels


@pytest.mark.slow
def test_weights_are_transposed_for_single_rows(kernels):
    """One prompt, several, one: the layout follows the engine, and no value is lost."""
    llm = load(SINGLE, "gpu")
    before = jax.tree.map(lambda array: np.array(array), llm.model.checkpoint_weights)
    prompts = np.random.default_rng(2).integers(0, 64, (3, 7))
    first = llm.generate(prompts[:1], max_new_tokens=2, ignore_eos=True)
    assert llm.weights["head"]["weight"].shape == (64, 512)
    jax.tree.map(np.testing.assert_array_equal, llm.model.checkpoint_weights, before)
    llm.generate(prompts, max_new_tokens=2, ignore_eos=True)
    assert llm.weights["head"]["weight"].shape == (512, 64)
    np.testing.assert_array_equal(
        llm.generate(prompts[:1], max_new_tokens=2, ignore_eos=True), first
    )


def test_merging_frees_the_arrays_that_it_copies():
    plain = load(TINY)
    arrays = flatten_dict(plain.weights)
    merged = LLM(
        plain.config,
        plain.template,
        plain.weights,
        context=replace(
            inference_context(plain.config, plain.rules), platform="gpu", capability="9.0"
        ),
    )
    deleted = {path[-2] for path, array in arrays.items() if array.is_deleted()}
    assert deleted == {"query", "key", "value", "wi_0", "wi_1"}
    assert np.isfinite(merged.logits([1, 2, 3])).all()
