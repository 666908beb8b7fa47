"""A tiny Llama folder that transformers saved, with a tokenizer, and the model loaded from it."""

import json

import numpy as np
import pytest

from maxtext import LLM
from tests.inference import few_shapes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(3, 61))]


def build_hf_model():
    torch.manual_seed(58)  # the greedy tokens of a row are all different
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (1.0 if parameter.ndim == 2 else 0.1) * 0.3
            )
    return model


def write_tokenizer(folder, words=WORDS):
    """One token a word; a text begins with <s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def model():
    return build_hf_model()


@pytest.fixture(scope="session")
def folder(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def llm(folder):
    return LLM.load(
        folder,
        dtype="float32",
        weight_dtype="float32",
        matmul_precision="highest",
        attention="dot_product",
    )


@pytest.fixture(scope="session")
def ids():
    return np.random.default_rng(0).integers(3, len(WORDS), (3, 9))


@pytest.fixture
def few_programs(monkeypatch):
    """Engines that compile few programs."""
    few_shapes.patch(monkeypatch)
