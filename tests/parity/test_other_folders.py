"""Folders that hold other than one text model under its usual names: with images, without a prefix,
in parts.
"""

import json

import numpy as np
import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file

from maxtext import LLM
from maxtext.checkpoint.convert import command as convert
from maxtext.checkpoint.open import open_checkpoint
from maxtext.checkpoint.weights import ModelWeights
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.sources import from_python
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_weights
from maxtext.trainers.configuration import load_run

EYES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
SQUARES = EYES | dict(image_size=28, patch_size=14)
# Classes, the text model, and what is beside it.
LARGER = {
    "gemma3": ("Gemma3", "gemma3", dict(vision_config=SQUARES, mm_tokens_per_image=4,
                                        image_token_index=5)),
    "gemma4": (
        "Gemma4", "gemma4 experts",
        dict(vision_config=EYES | dict(num_key_value_heads=2, head_dim=16), audio_config=None),
    ),
    "llama4": (
        "Llama4", "llama4 scaled",
        dict(vision_config=SQUARES | dict(vision_output_dim=32, projector_input_dim=32,
                                          projector_output_dim=32)),
    ),
    "qwen3.5": (
        "Qwen3_5", "qwen3.5 one to one",
        dict(vision_config=dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2,
                                out_hidden_size=48,
                                num_position_embeddings=16)),
    ),
}  # fmt: skip
IDS = np.random.default_rng(0).integers(10, zoo.VOCABULARY, (zoo.ROWS, zoo.LENGTH))


@pytest.mark.parametrize("name", zoo.parameters(LARGER, {"llama4"}))
@pytest.mark.slow
def test_text_of_a_model_with_images(name, specimen, tmp_path):
    """What is read, and written as a text model, with and without a native folder in between."""
    kind, text, beside = LARGER[name]
    tolerance = specimen(text).tolerance
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        text_config=dict(zoo.CASES[text].options), **beside
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    zoo.stir(model)
    model.save_pretrained(tmp_path / "whole")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor(IDS)).logits.numpy()
    llm = LLM.load(tmp_path / "whole", **zoo.SETTINGS)
    assert zoo.distance(llm.logits(IDS), expected) < tolerance
    with pytest.raises(
        ConfigError, match="vision or audio tensors, such as .* would be lost: pass text_only=True"
    ):
        llm.save_hf(tmp_path / "text")
    assert not (tmp_path / "text").exists()
    llm.save_hf(tmp_path / "text", text_only=True)
    assert zoo.distance(zoo.hf_logits(tmp_path / "text", IDS), expected) < 1e-6
    llm.save(tmp_path / "native")
    LLM.load(tmp_path / "native", **zoo.SETTINGS).save_hf(tmp_path / "again", text_only=True)
    assert zoo.distance(zoo.hf_logits(tmp_path / "again", IDS), expected) < 1e-6


@pytest.mark.parametrize("name", zoo.parameters(["llama float16", "gpt2"], {"gpt2"}))
def test_names_without_the_prefix_of_the_model(name, specimen, tmp_path):
    """As GPT-2 was published: tensors of the model below the head, and masks among them."""
    example = specimen(name)
    tensors = load_file(example.folder / "model.safetensors")
    bare = {
        tensor.removeprefix("model.").removeprefix("transformer."): tensors[tensor]
        for tensor in tensors
    }
    if name == "gpt2":
        bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((example.folder / "config.json").read_text())
    llm = LLM.load(tmp_path, **zoo.SETTINGS)
    assert zoo.distance(llm.logits(example.ids), example.logits) < example.tolerance


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_selection_bias_stays_float32_among_bfloat16_weights(bias_dtype, specimen, tmp_path):
    """As transformers loads it, from folders that have it so and from those with a bias in
    bfloat16.
    """
    example = specimen("deepseek3")
    is_bias = "e_score_correction_bias".__contains__
    for file in example.folder.glob("*.safetensors"):
        tensors = {
            name: tensor.to(bias_dtype if is_bias(name.rpartition(".")[2]) else torch.bfloat16)
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, tmp_path / file.name, {"format": "pt"})
    config = json.loads((example.folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    expected = {
        name: bias
        for name, bias in hf_model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    assert {bias.dtype for bias in expected.values()} == {torch.float32}
    llm = LLM.load(tmp_path)
    weights = ModelWeights(llm.weights, llm.param_infos)
    kinds = {name: np.dtype(tensor.dtype).name for name, tensor in weights.tensors.items()}
    biases = [name for name in kinds if name.endswith("router/bias")]
    assert {kinds[name] for name in biases} == {"float32"}
    assert {kind for name, kind in kinds.items() if name not in biases} == {"bfloat16"}
    for name, (_, bias) in zip(biases, sorted(expected.items()), strict=True):
        np.testing.assert_array_equal(weights.read(name), bias.numpy())

    # Written in bfloat16 the bias is exact: from the model, and converted from folder to folder.
    llm.save_hf(tmp_path / "hf", dtype="bfloat16")
    convert.from_folder(tmp_path, tmp_path / "native", "bfloat16")
    convert.to_folder(tmp_path / "native", tmp_path / "converted", "bfloat16")
    for folder in ("hf", "converted"):
        written = {
            name: tensor
            for file in (tmp_path / folder).glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for name, tensor in written.items():
            assert tensor.dtype == (torch.float32 if name in expected else torch.bfloat16), name
            assert name not in expected or tensor.equal(expected[name]), name
        assert expected.keys() <= written.keys()


def test_the_zoo_has_weights_in_several_files(specimen):
    for name in ("llama bfloat16", "mixtral"):
        index = json.loads((specimen(name).folder / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1


def write_tied(example, folder, change):
    """The folder of a tied model, its weights in several files, after `change` of its tensors."""
    case = example.case
    torch.manual_seed(1)
    config = getattr(transformers, f"{case.kind}Config")(
        **case.options | {"tie_word_embeddings": False}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    zoo.stir(model)
    change(model)
    model.save_pretrained(folder, max_shard_size="20KB")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    assert len(list(folder.glob("*.safetensors"))) > 2


def all_tensors(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_head_with_values_of_its_own_is_not_tied(name, specimen, tmp_path, caplog):
    """transformers keeps the two tensors apart whatever config.json says: so do loading, saving and
    converting, and what is written says so.
    """
    example = specimen(name)
    write_tied(example, tmp_path / "hf", lambda model: None)
    expected, tolerance = zoo.logits_and_tolerance(tmp_path / "hf", example.ids)
    with caplog.at_level("WARNING", logger="maxtext"):
        llm = LLM.load(tmp_path / "hf", **zoo.SETTINGS)
    assert caplog.text.count("lm_head.weight differs from the embedding") == 1
    assert zoo.distance(llm.logits(example.ids), expected) < tolerance

    llm.save_hf(tmp_path / "saved")
    convert.from_folder(tmp_path / "hf", tmp_path / "native")
    convert.to_folder(tmp_path / "native", tmp_path / "converted")
    tensors = all_tensors(tmp_path / "hf")
    for folder in ("saved", "converted"):
        assert (
            json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"]
            is False
        )
        written = all_tensors(tmp_path / folder)
        assert written.keys() == tensors.keys()
        assert all(tensor.equal(tensors[key]) for key, tensor in written.items())


def test_training_keeps_a_head_with_values_of_its_own(specimen, tmp_path):
    write_tied(specimen("llama"), tmp_path, lambda model: None)
    keys = {"load_parameters_path": str(tmp_path), "per_device_batch_size": 1}
    checkpoint = open_checkpoint(tmp_path)
    config = load_run(None, from_python(keys | {"max_target_length": 16}), checkpoint)
    weights = initial_weights(build_run_context(config), checkpoint)
    np.testing.assert_array_equal(
        weights["head"]["weight"], all_tensors(tmp_path)["lm_head.weight"].numpy().T
    )


def test_a_key_that_ties_a_head_with_values_of_its_own_is_refused(specimen, tmp_path):
    write_tied(specimen("llama"), tmp_path, lambda model: None)
    with pytest.raises(UserError, match="would drop it: set logits_via_embedding=false"):
        LLM.load(tmp_path, **zoo.SETTINGS, logits_via_embedding=True, override_model_config=True)


def test_a_head_equal_to_the_embedding_is_tied(specimen, tmp_path, caplog):
    def tie(model):
        model.lm_head.weight.data.copy_(model.get_input_embeddings().weight)

    write_tied(specimen("llama"), tmp_path / "hf", tie)
    llm = LLM.load(tmp_path / "hf", **zoo.SETTINGS)
    assert llm.config.logits_via_embedding
    assert "differs" not in caplog.text
    llm.save_hf(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["tie_word_embeddings"] is True
    expected = zoo.hf_logits(tmp_path / "hf", IDS)
    assert zoo.distance(zoo.hf_logits(tmp_path / "saved", IDS), expected) < 1e-6


def test_a_tied_folder_may_have_the_head_alone(specimen, tmp_path):
    """transformers ties to the one of the two tensors that is there."""
    example = specimen("llama tied with biases")
    tensors = load_file(example.folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((example.folder / "config.json").read_text())
    expected, tolerance = zoo.logits_and_tolerance(tmp_path, example.ids)
    llm = LLM.load(tmp_path, **zoo.SETTINGS)
    assert zoo.distance(llm.logits(example.ids), expected) < tolerance
    llm.save_hf(tmp_path / "saved")
    assert zoo.distance(zoo.hf_logits(tmp_path / "saved", example.ids), expected) < 1e-6
