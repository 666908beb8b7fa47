"""A single new token as on one GPU, its kernels interpreted, against the general way through the
same layers.
"""

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

from maxtext import LLM
from maxtext.kernels.decode import gemv
from maxtext.kernels.decode import paged_attention as decode
from maxtext.layers import attend, joined

pytestmark = pytest.mark.usefixtures("quick_programs")

SIZES = {
    "base_emb_dim": 512, "base_num_query_heads": 16, "base_num_kv_heads": 4, "head_dim": 32, "base_mlp_dim": 512,
    "base_num_decoder_layers": 1, "vocab_size": 64, "max_target_length": 16, "dtype": "bfloat16",
    "weight_dtype": "bfloat16",
}  # fmt: skip
ALL = {"norm_qkv_rope", "norm_gate_up", "gemv_add", "gemv"}
AFTER = {"use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 16}
FAMILIES = {
    "llama": ({"decoder_block": "llama2"}, ALL),
    "queries normed": ({"decoder_block": "qwen3", "use_qk_norm": True}, ALL - {"norm_qkv_rope"}),
    "tied, gelu": ({"decoder_block": "gemma", "logits_via_embedding": True}, ALL - {"gemv"}),
    "normed after": ({"decoder_block": "gemma2", **AFTER}, {"gemv"}),
    "one branch, biases": ({"decoder_block": "gpt3"}, {"gemv"}),
    "a small cache": ({"decoder_block": "llama2", "quantize_kvcache": True}, ALL),
    "products in float32": ({"decoder_block": "llama2", "dtype": "float32"}, set()),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The names of the kernels that programs have."""
    found = set()

    def interpreted(*arguments, run=pl.pallas_call, **options):
        found.add(options["name"].removeprefix("decode_"))
        return run(*arguments, **options | {"interpret": True})

    monkeypatch.setattr(pl, "pallas_call", interpreted)
    for tiles in ("PAIRS", "SINGLE"):  # an interpreter wants few programs
        monkeypatch.setattr(gemv, tiles, gemv.Tiles(16, 512, 1))
    monkeypatch.setattr(decode, "supports", lambda *facts: None)
    for place in (joined, attend):
        monkeypatch.setattr(place, "only_platform", lambda: "gpu")
    for module in ("engine", "executor"):
        monkeypatch.setattr(f"maxtext.inference.{module}.platform", lambda rules: "gpu")
    return found


def check(prompts, keys):
    """Each token is the best of the general way, or as good as that within what bfloat16 tells
    apart.
    """
    found = LLM.load("default", **SIZES | keys).generate(prompts, max_new_tokens=4, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined, "only_platform", lambda: "cpu")
        scores = LLM.load("default", **SIZES | keys).logits(
            np.concatenate([prompts, found], axis=1)
        )
    right = np.asarray(scores, np.float32)[:, prompts.shape[1] - 1 : -1]
    chosen = np.take_along_axis(right, np.asarray(found)[..., None], axis=-1)[..., 0]
    assert np.all(right.max(axis=-1) - chosen <= 0.02 * np.abs(right).max())


@pytest.mark.parametrize(("keys", "kernels"), FAMILIES.values(), ids=list(FAMILIES))
def test_one_row(as_on_a_gpu, keys, kernels):
    check(np.random.default_rng(0).integers(0, 64, (1, 9)), keys)
    assert as_on_a_gpu & ALL == kernels


def test_several_rows(as_on_a_gpu):
    check(np.random.default_rng(1).integers(0, 64, (3, 7)), {})
    assert "split_qkv_rope" in as_on_a_gpu
    assert not as_on_a_gpu & ALL


@pytest.mark.slow
def test_kernels_lie_as_they_are_used(as_on_a_gpu):
    """One prompt, several, one: each time laid out anew, and never lost."""
    llm = LLM.load("default", **SIZES)
    before = joined.apart(llm.weights)
    prompts = np.random.default_rng(2).integers(0, 64, (3, 7))
    first = llm.generate(prompts[:1], max_new_tokens=2, ignore_eos=True)
    assert llm.weights["head"]["kernel"].by_column
    jax.tree.map(np.testing.assert_array_equal, joined.apart(llm.weights), before)
    llm.generate(prompts, max_new_tokens=2, ignore_eos=True)
    assert not llm.weights["head"]["kernel"].by_column
    np.testing.assert_array_equal(
        llm.generate(prompts[:1], max_new_tokens=2, ignore_eos=True), first
    )
