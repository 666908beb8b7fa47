"""Models loaded from Hugging Face folders compute what transformers computes, and are written back
bit for bit.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import zoo
from safetensors.torch import load_file

from maxtext import LLM
from maxtext.inference import GenerationRequest, SamplingParams
from maxtext.models.registry import layers

NEW_TOKENS = 6


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_same_tensors(folder: Path, other: Path) -> None:
    written, expected = tensors(folder), tensors(other)
    assert sorted(written) == sorted(expected)
    wrong = [
        name
        for name in written
        if written[name].dtype != expected[name].dtype or not written[name].equal(expected[name])
    ]
    assert not wrong


@pytest.mark.parametrize("name", zoo.parameters(zoo.CASES))
def test_logits(name, specimen, model):
    example = specimen(name)
    assert zoo.distance(model(name).logits(example.ids), example.logits) < example.tolerance


# The tensors of the other cases are written and read in `test_written_anew`.
ROUND_TRIPS = zoo.FAST | set(zoo.ONE_EACH)


@pytest.mark.parametrize(
    "name", zoo.parameters(zoo.CASES, ROUND_TRIPS, further=pytest.mark.exhaustive)
)
def test_round_trips(name, specimen, model, tmp_path):
    """Through a Hugging Face folder, and through a native one, which describes the same layers."""
    example, loaded = specimen(name), model(name)
    loaded.save_hf(tmp_path / "hf")
    assert_same_tensors(tmp_path / "hf", example.folder)

    if example.case.dtype != torch.float32:  # a native folder keeps the dtypes of the model
        loaded = LLM.load(
            example.folder, weight_dtype=str(example.case.dtype).removeprefix("torch.")
        )
    loaded.save(tmp_path / "native")
    again = LLM.load(tmp_path / "native", **zoo.SETTINGS)
    assert layers(again.config) == layers(model(name).config)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.weights, model(name).weights))
    again.save_hf(tmp_path / "again")
    assert_same_tensors(tmp_path / "again", example.folder)


# Those whose layers are of several kinds; `test_greedy` has all families unrolled from such a
# folder.
MIXED = [
    "gemma2",
    "gemma4 shared experts",
    "qwen3-next one to one",
    "deepseek3",
    "gpt-oss",
    "llama4 scaled",
]


@pytest.mark.parametrize("name", zoo.parameters(MIXED, {"gemma2"}))
def test_unrolled_from_a_native_folder(name, specimen, model, tmp_path):
    example = specimen(name)
    model(name).save(tmp_path)
    unrolled = LLM.load(tmp_path, **(zoo.SETTINGS | {"scan_layers": False}))
    assert zoo.distance(unrolled.logits(example.ids), example.logits) < example.tolerance


# Every kind of cache and block. The others combine these: Qwen3.5 has the caches of Qwen3-Next,
# Gemma 3, OLMo 3, Mixtral and Cohere 2 have the windows of Gemma 4 and GPT-OSS, DeepSeek 3 is 3.2
# without its indexer, Qwen3 is Llama with norms of Gemma 4, Phi 3 is Llama with other rotations.
@pytest.mark.representative(
    "deepseek3.2",
    "qwen3-next one to one",
    "gpt-oss",
    "llama4 scaled",
    "gemma4 shared experts",
    "llama",
    "gpt2",
)
@pytest.mark.parametrize("name", zoo.parameters(zoo.ONE_EACH, {"llama", "gemma2"}))
def test_greedy(name, specimen, model, tmp_path):
    """Prompts of two lengths, both longer than windows and chunks. Their pieces have one shape: few
    programs.
    """
    example = specimen(name)
    prompts = [
        [int(token) for token in row[:length]]
        for row, length in zip(example.ids, (23, 21), strict=True)
    ]
    hf_model = zoo.hf_model(example.folder)
    expected = [zoo.continued(hf_model, prompt, NEW_TOKENS) for prompt in prompts]
    assert model(name).generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True) == expected
    # In pieces, one after the other; and then from what is known of their beginnings. Unrolled,
    # from a native folder.
    pieces = {"use_chunked_prefill": True, "prefill_chunk_size": 9}
    known = {
        "enable_prefix_caching": True,
        "pagedattn_tokens_per_page": 4,
        "per_device_batch_size": 2,
    }
    known = known if model(name).programs.has_caches else {}
    model(name).save(tmp_path)
    again = LLM.load(tmp_path, **(zoo.SETTINGS | {"scan_layers": False} | pieces | known))
    for _ in range(2):
        assert again.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True) == expected
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    (completion,) = again.completions(iter([GenerationRequest(prompts[0], params)]))
    log_probs = torch.log_softmax(torch.tensor(example.logits[0]), -1)[range(22), prompts[0][1:]]
    records = [record.logprob for record in completion.prompt_logprobs if record]
    assert zoo.distance(records, log_probs.numpy()) < 2 * example.tolerance  # of two logits
    if known:
        assert again.engine.prefix_cache.hits >= 40
