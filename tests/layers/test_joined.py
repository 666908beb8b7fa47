"""Models whose kernels are joined answer as they did, and give their weights back as they were."""

import jax
import numpy as np
import pytest

from maxtext import LLM
from maxtext.layers import joined

pytestmark = pytest.mark.usefixtures("quick_programs")

TINY = {
    "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 8, "base_mlp_dim": 48,
    "base_num_decoder_layers": 1, "vocab_size": 64, "max_target_length": 32, "dtype": "float32",
    "weight_dtype": "float32", "matmul_precision": "highest",
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "attention_type": "mla", "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 6, "first_num_dense_layers": 0, "shared_experts": 1, "routed_bias": True, "use_indexer": True,
    "indexer_topk": 3, "indexer_head_dim": 8, "indexer_n_heads": 2, "base_num_kv_heads": 4, "head_dim": None,
}  # fmt: skip
# with how many arrays there are in the end: queries, keys and values, out, gate and up, wo; the
# head
FAMILIES = {
    "llama": ({"decoder_block": "llama2"}, 5),
    "biases": ({"decoder_block": "llama2", "attention_bias": True}, 5),
    "shared keys": (
        {"decoder_block": "gemma4", "share_kv_projections": True, "sliding_window_size": 8},
        5,
    ),
    "experts": ({"decoder_block": "mixtral", **EXPERTS}, 3),  # attention alone
    "delta nets": ({"decoder_block": "qwen3_next", "gdn_num_value_heads": 16, **EXPERTS}, 3),
    "indexer": (
        {"decoder_block": "deepseek", **LATENT, **EXPERTS},
        4,
    ),  # the shared experts, and what attention gives
    "scanned": ({"decoder_block": "llama2", "scan_layers": True}, 1),
    "integers": ({"decoder_block": "llama2", "quantization": "int8"}, 0),
}


def count(weights):
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, joined.Joined))
    return sum(isinstance(leaf, joined.Joined) and leaf.values is not None for leaf in leaves)


@pytest.mark.parametrize(("keys", "many"), FAMILIES.values(), ids=list(FAMILIES))
def test_the_same_answers_and_weights(monkeypatch, keys, many):
    keys = {key: value for key, value in (TINY | keys).items() if value is not None}
    plain = LLM.load("default", **keys)
    monkeypatch.setattr(joined, "only_platform", lambda: "gpu")
    ours = LLM.load("default", **keys)
    assert (count(plain.weights), count(ours.weights)) == (0, many)
    ids = np.random.default_rng(0).integers(0, 64, (2, 12))
    np.testing.assert_allclose(ours.logits(ids), plain.logits(ids), atol=1e-5)
    again = joined.apart(ours.weights)
    assert jax.tree.structure(again) == jax.tree.structure(plain.weights)
    jax.tree.map(np.testing.assert_array_equal, again, plain.weights)


def test_generated_and_saved(monkeypatch, tmp_path):
    plain = LLM.load("default", **TINY)
    with monkeypatch.context() as patch:
        patch.setattr(joined, "only_platform", lambda: "gpu")
        ours = LLM.load("default", **TINY)
    ids = np.random.default_rng(0).integers(0, 64, (2, 12))
    np.testing.assert_array_equal(
        ours.generate(ids, max_new_tokens=4), plain.generate(ids, max_new_tokens=4)
    )
    ours.save(tmp_path / "saved")
    saved = LLM.load(tmp_path / "saved", dtype="float32", matmul_precision="highest")
    jax.tree.map(np.testing.assert_array_equal, saved.weights, plain.weights)
