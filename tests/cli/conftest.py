"""Fixtures of several commands: a tiny checkpoint with a chat template, and a restored logger."""

import pytest

from maxtext.common.log import LOGGER
from tests.cli.fake_llm import FakeLLM, install, write_checkpoint

SIZES = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "vocab_size": 400,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
}
LENGTH = 64


@pytest.fixture(autouse=True)
def same_logger():
    """Commands configure it for their output streams."""
    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    yield
    LOGGER.handlers[:], LOGGER.level, LOGGER.propagate = before


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def loaded(monkeypatch):
    """The fake models that a command has loaded."""
    monkeypatch.setattr(FakeLLM, "tokenizer_class", FakeLLM.tokenizer_class)
    return install(monkeypatch)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """(a native folder with random weights and a tokenizer with a chat template, the model)."""
    import jax

    import maxtext
    from maxtext.models.transformer import initial_weights, make_template
    from tests.tokenizers.tiny import write_bpe

    folder = tmp_path_factory.mktemp("chat_model") / "model"
    config = maxtext.config(**SIZES)
    # Larger weights, so that tokens differ.
    weights = jax.tree.map(lambda weight: weight * 4, initial_weights(config))
    maxtext.LLM(config, make_template(config), weights).save(folder)
    write_bpe(folder / "hugging_face")
    return folder, maxtext.LLM.load(
        folder, **{key: SIZES[key] for key in ("dtype", "weight_dtype", "attention")}
    )


@pytest.fixture(scope="session")
def greedy_ids(chat_model):
    """Greedy ids by recomputing the sequence for each token, without cache and engine."""
    import numpy as np

    def extend(ids, count):
        ids = list(ids)
        for _ in range(count):
            # One length is one program; what follows a token does not change its logits.
            row = np.zeros(LENGTH, int)
            row[: len(ids)] = ids
            ids.append(int(np.argmax(np.asarray(chat_model[1].logits(row))[len(ids) - 1])))
            if ids[-1] in chat_model[1].eos_ids:
                break
        return ids

    return extend
