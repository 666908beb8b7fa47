"""Quantized folders against transformers: what codes and scales stand for in torch, and the scores
of its models.
"""

import json
import logging
import tracemalloc
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_layers import MtpLayer

from maxtext import LLM
from maxtext.checkpoint.convert.command import from_folder, to_folder
from maxtext.checkpoint.open import open_checkpoint
from maxtext.checkpoint.quantized import Dequantized
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.hf.quantized import BlockFloat8, MicroscalingFloat4, quantized_format
from maxtext.layers.inputs import LayerInputs

BLOCK = 128
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}
VOCABULARY, LENGTH, LAYERS = 96, 24, 2
# Widths of one block and a part; as in the published models, one that is far below a block.
DEEPSEEK = dict(
    vocab_size=VOCABULARY,
    hidden_size=160,
    intermediate_size=136,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=32,
    qk_rope_head_dim=8,
    v_head_dim=40,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    first_k_dense_replace=1,
    max_position_embeddings=512,
    num_nextn_predict_layers=1,
)
GPT_OSS = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=6,
    num_experts_per_tok=2,
    sliding_window=12,
)
SETTINGS = dict(
    dtype="float32", weight_dtype="float32", matmul_precision="highest", attention="dot_product"
)
TOLERANCE = 5e-5  # of the scores' standard deviation


def stirred(module):
    """Random weights large enough that each of them shows in the scores."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, one in [*module.named_parameters(), *module.named_buffers()]:
            noise = torch.randn(one.shape, generator=generator)
            if one.ndim > 1:
                one.copy_(noise if "embed_tokens" in name else noise * 1.5 / one.shape[-1] ** 0.5)
            elif "inv_freq" not in name:
                one.add_(noise * 0.1)
    return module.eval().float()


def in_fp8(weight):
    """Codes and scales of a matrix, by the largest number of each block."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    codes, scales = torch.empty_like(weight), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            here = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            scales[row, column] = weight[here].abs().max() / 448
            codes[here] = weight[here] / scales[row, column]
    return codes.to(torch.float8_e4m3fn), scales


def from_fp8(codes, scales):
    wide = scales.float()
    for axis in (-2, -1):
        wide = wide.repeat_interleave(BLOCK, axis).narrow(axis, 0, codes.shape[axis])
    return (codes.float() * wide).bfloat16()


@dataclass
class Pair:
    """A quantized folder, and what it stands for."""

    folder: object
    plain: dict  # its tensors in bfloat16 where they were quantized
    model: torch.nn.Module  # of the plain tensors

    @cached_property
    def ids(self):
        return np.random.default_rng(0).integers(3, VOCABULARY, (2, LENGTH))

    @cached_property
    def scores(self):
        with torch.no_grad():
            return self.model(input_ids=torch.tensor(self.ids), use_cache=False).logits.numpy()


def write(folder, tensors, model, quantization):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    stated = json.loads(model.config.to_json_string(use_diff=False))
    stated |= {
        "architectures": [type(model).__name__],
        "dtype": "bfloat16",
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(stated))


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """As published, with a layer that predicts further tokens, and that has copies of embedding and
    head.
    """
    where = tmp_path_factory.mktemp("deepseek")
    config = transformers.DeepseekV3Config(**DEEPSEEK)
    config._attn_implementation = "eager"
    model = stirred(transformers.DeepseekV3ForCausalLM(config))
    tensors = saved(model, where / "saved")
    # At first the only layer of a model, so that transformers writes its experts one by one.
    further = transformers.DeepseekV3ForCausalLM(config.get_mtp_config())
    number = f"model.layers.{LAYERS}."
    for name, tensor in saved(stirred(further), where / "further").items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0.", number)] = tensor * 0.9
    generator = torch.Generator().manual_seed(2)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{number}{name}.weight"] = 1 + 0.1 * torch.randn(
            config.hidden_size, generator=generator
        )
    tensors[f"{number}eh_proj.weight"] = (
        torch.randn(config.hidden_size, 2 * config.hidden_size, generator=generator) / 9
    )
    tensors[f"{number}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{number}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    plain, quantized = {}, {}
    for name, tensor in tensors.items():
        plain[name] = quantized[name] = tensor if "correction_bias" in name else tensor.bfloat16()
        if "proj" in name.split(".")[-2]:
            quantized[name], quantized[f"{name}_scale_inv"] = codes, scales = in_fp8(tensor)
            plain[name] = from_fp8(codes, scales)
    write(where / "quantized", quantized, model, FP8 | {"modules_to_not_convert": ["lm_head"]})
    save_file(
        {name: tensor for name, tensor in plain.items() if number not in name},
        where / "saved/model.safetensors",
    )
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        where / "saved", dtype=torch.float32, attn_implementation="eager"
    )
    return Pair(where / "quantized", plain, model)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    where = tmp_path_factory.mktemp("gpt_oss")
    config = transformers.GptOssConfig(**GPT_OSS)
    config._attn_implementation = "eager"
    model = stirred(transformers.GptOssForCausalLM(config))
    plain = {name: tensor.bfloat16() for name, tensor in saved(model, where / "saved").items()}
    quantized = dict(plain)
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = quantized.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        codes = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 125, shape, dtype=torch.uint8, generator=generator)
        quantized |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(codes, scales)
    write(
        where / "quantized",
        quantized,
        model,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )
    model.load_state_dict(plain)
    return Pair(where / "quantized", plain, model)


@pytest.fixture(params=["deepseek", "gpt_oss"])
def pair(request):
    return request.getfixturevalue(request.param)


def distance(scores, expected):
    return float(np.abs(np.asarray(scores) - expected).max() / expected.std())


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_same_tensors(folder, expected):
    found = load_file(folder / "model.safetensors")
    assert sorted(found) == sorted(expected)
    wrong = [
        n for n in found if found[n].dtype != expected[n].dtype or not found[n].equal(expected[n])
    ]
    assert not wrong


def written(pair, further=False):
    """The tensors that should be in a native folder: no copies, no buffers, and further layers
    only if asked for.
    """
    left_out = [
        "inv_freq",
        f"layers.{LAYERS}.embed_tokens",
        "shared_head.head",
        *([] if further else [f"layers.{LAYERS}."]),
    ]
    return {
        name: tensor
        for name, tensor in pair.plain.items()
        if not any(part in name for part in left_out)
    }


@pytest.mark.slow
def test_experts_that_stay_in_mxfp4_have_the_same_values(gpt_oss):
    model = LLM.load(gpt_oss.folder, quantization="mxfp4", **SETTINGS)
    assert any(weight.dtype == jnp.uint8 for weight in jax.tree.leaves(model.weights))
    assert distance(model.logits(gpt_oss.ids), gpt_oss.scores) < TOLERANCE


@pytest.mark.slow
def test_scores_and_saving(pair, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(LOGGER, "propagate", True)
    with caplog.at_level(logging.INFO, "maxtext"):
        model = LLM.load(pair.folder, **SETTINGS)
    assert distance(model.logits(pair.ids), pair.scores) < TOLERANCE
    left_out = len(pair.plain) - len(written(pair))
    messages = [message for message in caplog.messages if "not part of the model" in message]
    assert len(messages) == bool(left_out)
    assert all(f" {left_out} tensors" in message for message in messages)

    model.save_hf(tmp_path)
    assert_same_tensors(tmp_path, written(pair))
    stated = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in stated
    assert stated["dtype"] == "bfloat16"
    assert not stated.get("num_nextn_predict_layers")
    assert distance(LLM.load(tmp_path, **SETTINGS).logits(pair.ids), pair.scores) < TOLERANCE


def test_converted(pair, tmp_path):
    from_folder(pair.folder, tmp_path / "native")
    to_folder(tmp_path / "native", tmp_path / "hf")
    assert_same_tensors(tmp_path / "hf", written(pair))
    assert "quantization_config" not in json.loads((tmp_path / "hf/config.json").read_text())


def test_further_tokens(deepseek, tmp_path):
    """mtp_num_layers=1 takes the layer beyond the last, which computes what transformers' layer
    does.
    """
    number = f"model.layers.{LAYERS}."
    model = LLM.load(deepseek.folder, mtp_num_layers=1, **SETTINGS)
    model.save_hf(tmp_path)
    assert_same_tensors(tmp_path, written(deepseek, further=True))
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1

    hf_model = deepseek.model
    layer = MtpLayer(
        hf_model.config.get_mtp_config(),
        type(hf_model.model.layers[-1]),
        type(hf_model.model.norm),
        layer_idx=0,
    ).float()
    state = {}
    for name, tensor in written(deepseek, further=True).items():
        if name.startswith(number):
            rest = name.removeprefix(number)
            outside = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
            state[
                rest.replace("shared_head.norm", "post_norm")
                if rest in outside
                else f"mtp_block.{rest}"
            ] = tensor
    experts = {name: state.pop(name) for name in list(state) if ".experts." in name}

    def stack(branch):
        rows = [
            experts[f"mtp_block.mlp.experts.{x}.{branch}_proj.weight"]
            for x in range(DEEPSEEK["n_routed_experts"])
        ]
        return torch.stack(rows)

    state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], dim=1)
    state["mtp_block.mlp.experts.down_proj"] = stack("down")
    layer.load_state_dict(state)

    ids = torch.tensor(deepseek.ids)
    hidden = torch.randn(
        *ids.shape, DEEPSEEK["hidden_size"], generator=torch.Generator().manual_seed(3)
    )
    following = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    positions = torch.arange(LENGTH)[None].expand_as(ids)
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        embedded = hf_model.model.embed_tokens(following)
        rotary = hf_model.model.rotary_emb(embedded, position_ids=positions)
        expected = layer(embedded, hidden, rotary, mask, positions, None).numpy()

    @jax.jit
    def run(weights, x, tokens):
        bound = model.template.bind(weights)
        return bound.mtp(
            x, bound.embed, LayerInputs(jnp.asarray(positions.numpy()), None, tokens=tokens), tokens
        )[0]

    with model.programs.context():
        (found,) = run(
            model.weights, jnp.asarray(hidden.numpy()), jnp.asarray(deepseek.ids, jnp.int32)
        )
    assert distance(found, expected) < TOLERANCE


@dataclass
class Memory:
    """Arrays as a source."""

    arrays: dict
    title: str = "memory"

    @property
    def tensors(self):
        return {name: TensorInfo(array.dtype, array.shape) for name, array in self.arrays.items()}

    def read(self, name):
        return self.arrays[name]


def codes8(*shape):
    """Every code there is, the two for no number included."""
    return np.resize(np.arange(256, dtype=np.uint8), shape).view(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(130, 300), (128, 256), (3, 70, 129), (5, 1)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float8_e8m0fnu"])
def test_fp8_values(shape, kind):
    grid = (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    scales = np.random.default_rng(0).uniform(1e-3, 2, grid).astype(dtype)
    norm = np.ones(3, np.float32)
    source = Dequantized.of(
        Memory({"x.weight": codes8(*shape), "x.weight_scale_inv": scales, "norm": norm}),
        BlockFloat8(BLOCK, BLOCK),
    )
    assert source.tensors == {
        "x.weight": TensorInfo(np.dtype(ml_dtypes.bfloat16), shape),
        "norm": TensorInfo(norm.dtype, (3,)),
    }
    tensors = dict(source)
    assert tensors["norm"] is norm
    codes = torch.from_numpy(codes8(*shape).view(np.uint8)).view(torch.float8_e4m3fn)
    expected = from_fp8(codes, torch.from_numpy(scales.astype(np.float32)))
    known = ~torch.isnan(expected).numpy()
    assert (np.isnan(tensors["x.weight"].astype(np.float32)) == ~known).all()
    assert (bits(tensors["x.weight"])[known] == expected.view(torch.uint16).numpy()[known]).all()


def test_mxfp4_values():
    generator = np.random.default_rng(0)
    codes = generator.integers(256, size=(3, 10, 4, 16), dtype=np.uint8)
    scales = generator.integers(
        1, 253, size=(3, 10, 4), dtype=np.uint8
    )  # beyond, bfloat16 ends before 6 · 2^scale
    source = Dequantized.of(Memory({"x_blocks": codes, "x_scales": scales}), MicroscalingFloat4())
    assert source.tensors == {"x": TensorInfo(np.dtype(ml_dtypes.bfloat16), (3, 128, 10))}
    expected = convert_moe_packed_tensors(torch.from_numpy(codes), torch.from_numpy(scales))
    assert (bits(source.read("x")) == expected.view(torch.uint16).numpy()).all()


def test_memory():
    """A tensor in bfloat16 and blocks of it, never the whole in float32."""
    codes, scales = codes8(4096, 1024), np.ones((32, 8), np.float32)
    tracemalloc.start()
    value = BlockFloat8(BLOCK, BLOCK).dequantize(codes, scales)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < value.nbytes + 4 * value.size


W, S, B = "x.weight", "x.weight_scale_inv", "x_blocks"
ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({W: codes8(130, 300)}, "x.weight is F8_E4M3 and has no x.weight_scale_inv"),
        ({S: ONES}, "x.weight_scale_inv has no x.weight to scale"),
        ({W: ONES, S: ONES}, "x.weight_scale_inv scales x.weight, which is F32"),
        (
            {W: codes8(130, 256), S: ONES},
            r"x.weight_scale_inv has shape \[2, 3\], x.weight \[130, 256\] needs \[2, 2\]",
        ),
        (
            {W: codes8(130, 300), S: ONES.astype(np.int32)},
            "x.weight_scale_inv is I32, which is no dtype of scales",
        ),
        ({W: codes8(7), S: ONES}, r"x.weight has shape \[7\], not \[..., outputs, inputs\]"),
        (
            {W: ONES.astype(ml_dtypes.float8_e5m2)},
            "x.weight is F8_E5M2, which means nothing in this format",
        ),
    ],
)
def test_fp8_in_pieces(arrays, message):
    with pytest.raises(UserError, match=f"memory does not fit the model .*: {message}"):
        Dequantized.of(Memory(arrays), BlockFloat8(BLOCK, BLOCK))


@pytest.mark.parametrize(
    ("blocks", "scales", "others", "message"),
    [
        ((2, 4, 3, 16), None, {}, "x_blocks is U8 and has no x_scales"),
        (None, (2, 4, 3), {}, "x_scales has no x_blocks to scale"),
        (
            (2, 4, 3, 16),
            (2, 4, 2),
            {},
            r"x_scales has shape \[2, 4, 2\], x_blocks \[2, 4, 3, 16\] needs \[2, 4, 3\]",
        ),
        (
            (2, 4, 3, 8),
            (2, 4, 3),
            {},
            r"x_blocks has shape \[2, 4, 3, 8\], not \[experts, outputs, groups, 16\]",
        ),
        ((2, 4, 3, 16), (2, 4, 3), {"x": ONES}, "x and x_blocks are the same weight"),
        (
            (2, 4, 3, 16),
            (2, 4, 3),
            {"y": codes8(2)},
            "y is F8_E4M3, which means nothing in this format",
        ),
    ],
)
def test_mxfp4_in_pieces(blocks, scales, others, message):
    sizes = {"x_blocks": blocks, "x_scales": scales}
    arrays = {name: np.zeros(shape, np.uint8) for name, shape in sizes.items() if shape} | others
    with pytest.raises(UserError, match=f": {message}"):
        Dequantized.of(Memory(arrays), MicroscalingFloat4())


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"bits": 4}, "unknown"),
        (FP8 | {"weight_block_size": None}, "fp8, weight_block_size=None"),
        (FP8 | {"weight_block_size": [128]}, r"fp8, weight_block_size=\[128\]"),
        (FP8 | {"fmt": "e5m2"}, "fp8, fmt=e5m2"),
        (FP8 | {"activation_scheme": "static"}, "fp8, activation_scheme=static"),
        (FP8 | {"expert_dtype": "fp4"}, "fp8, expert_dtype=fp4"),
    ],
)
def test_other_schemes_are_refused(deepseek, tmp_path, stated, method):
    hf = json.loads((deepseek.folder / "config.json").read_text()) | {"quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(
        UserError,
        match=rf"config.json: the weights are quantized \({method}\): load the folder with",
    ):
        open_checkpoint(tmp_path)


def test_schemes():
    assert quantized_format({}, "here") is None
    assert quantized_format({"quantization_config": None}, "here") is None
    ue8m0 = {"quantization_config": FP8 | {"weight_block_size": [64, 32], "scale_fmt": "ue8m0"}}
    assert (
        quantized_format(ue8m0, "here")
        == quantized_format({"text_config": ue8m0}, "here")
        == BlockFloat8(64, 32)
    )


def test_a_folder_in_pieces(deepseek, tmp_path):
    """All that is wrong is found before any weight is read."""
    tensors = load_file(deepseek.folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((deepseek.folder / "config.json").read_text())
    with pytest.raises(UserError, match=f"{tmp_path} does not fit the model .* has no {name}"):
        LLM.load(tmp_path)
