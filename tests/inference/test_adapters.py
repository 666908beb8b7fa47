"""Adapters of PEFT with their base: logits, tokens, many in one batch, loading and merging."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from maxtext import LLM
from maxtext.checkpoint.open import open_checkpoint
from maxtext.cli import convert
from maxtext.cli.main import main
from maxtext.common.errors import ConfigError, UserError
from maxtext.inference import GenerationRequest, SamplingParams
from tests.compiling import cpu_devices
from tests.forked import run_python
from tests.support.served_adapters import (
    KINDS,
    SETTINGS,
    TOKENS,
    adapted,
    greedy,
    logits_of,
)

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def references(model):
    """PEFT's models by the name of their adapter; "" is the base."""
    wrapped = {name: adapted(model, KINDS[name], seed) for seed, name in enumerate(KINDS)}
    return {"": model} | wrapped


@pytest.fixture(scope="module")
def folders(references, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for name in KINDS:
        references[name].save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def served(folder, folders):
    return LLM.load(folder, lora_input_adapters_path=str(folders), **SETTINGS)


def test_logits_are_those_of_peft(served, references, ids):
    assert list(served.adapters.loaded) == sorted(KINDS)
    for name, model in references.items():
        expected = logits_of(model, ids)
        np.testing.assert_allclose(served.logits(ids, name), expected, rtol=1e-4, atol=1e-4)
    first = served.logits(ids)
    np.testing.assert_array_equal(first, served.logits(ids, sorted(KINDS)[0]))


def test_one_batch_has_different_adapters(served, references, ids):
    names = ["plain", "", "head"]
    expected = [greedy(references[name], ids[row : row + 1])[0] for row, name in enumerate(names)]
    tokens = served.generate(ids, max_new_tokens=TOKENS, ignore_eos=True, adapter=names)
    np.testing.assert_array_equal(tokens, np.stack(expected))
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    requests = [GenerationRequest(ids[0].tolist(), params, name) for name in ("dora", "")]
    completions = sorted(served.completions(requests), key=lambda completion: completion.index)
    for completion, name in zip(completions, ("dora", ""), strict=True):
        assert list(completion.token_ids) == greedy(references[name], ids[:1])[0].tolist()


@pytest.mark.slow
def test_cached_prefixes_are_not_shared_between_adapters(folder, folders, references, ids):
    llm = LLM.load(
        folder, adapters={"plain": folders / "plain"}, enable_prefix_caching=True,
        prefix_caching_hbm_byte=10**7, pagedattn_tokens_per_page=4, pagedattn_num_pages=64,
        max_target_length=32, per_device_batch_size=2, **(SETTINGS | {"attention": "paged"}),
    )  # fmt: skip
    for name in ("plain", "", "plain"):
        tokens = llm.generate(ids[:1], max_new_tokens=TOKENS, ignore_eos=True, adapter=name)
        np.testing.assert_array_equal(tokens, greedy(references[name], ids[:1]))
    assert llm.engine.prefix_cache.hits == 8  # the two full blocks of the last request


@pytest.mark.slow
def test_loading_and_dropping_an_adapter_compiles_nothing(folder, folders, references, ids):
    llm = LLM.load(folder, adapters=[folders / "plain"], max_adapters=2, **SETTINGS)
    llm.logits(ids)
    programs, compiled = llm.programs, llm.programs.forward._cache_size()
    llm.load_adapter(folders / "plain", "again")
    expected = logits_of(references["plain"], ids)
    np.testing.assert_allclose(llm.logits(ids, "again"), expected, rtol=1e-4, atol=1e-4)
    llm.drop_adapter("plain")
    np.testing.assert_allclose(llm.logits(ids), expected, rtol=1e-4, atol=1e-4)
    assert llm.programs is programs
    assert llm.programs.forward._cache_size() == compiled
    with pytest.raises(UserError, match="there is no adapter 'plain'; loaded: again"):
        llm.logits(ids, "plain")
    llm.load_adapter(folders / "dora")  # other layers, and DoRA: a new build
    assert llm.programs is not programs
    expected = logits_of(references["dora"], ids)
    np.testing.assert_allclose(llm.logits(ids, "dora"), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="max_adapters=2 adapters are loaded already"):
        llm.load_adapter(folders / "head")


def test_merged_model_is_that_of_peft(served, references, ids):
    merged = served.merge("dora")
    expected = logits_of(copy.deepcopy(references["dora"]).merge_and_unload(), ids)
    np.testing.assert_allclose(merged.logits(ids), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        served.logits(ids, "dora"), expected, rtol=1e-4, atol=1e-4
    )  # the served model keeps its weights


def test_saved_adapter_is_the_one_that_was_loaded(served, folders, tmp_path):
    from safetensors.numpy import load_file

    for name in KINDS:
        served.save_adapter(tmp_path / name, name)
        before, after = (
            load_file(path / name / "adapter_model.safetensors") for path in (folders, tmp_path)
        )
        assert before.keys() == after.keys()
        for key, array in before.items():
            np.testing.assert_array_equal(array, after[key])


def test_commands_merge_and_inspect_adapters(folder, folders, references, tmp_path, capsys):
    from safetensors.numpy import load_file

    out = tmp_path / "merged"
    assert convert.merge_adapter(str(folder), str(folders / "plain"), str(out)) == 0
    expected = copy.deepcopy(references["plain"]).merge_and_unload().state_dict()
    for name, tensor in load_file(out / "model.safetensors").items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    assert main(["inspect", str(folders / "dora"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["kind"] == "PEFT adapter"
    assert summary["about"]["r"] == 2
    assert summary["about"]["use_dora"] is True
    assert len(summary["tensors"]) == 12  # two modules of two layers, with three tensors each


def test_refuses_wrong_adapters_in_one_sentence(folder, folders, ids, tmp_path):
    with pytest.raises(ConfigError, match="two adapters are called plain"):
        LLM.load(folder, adapters=[folders / "plain", folders / "plain"], **SETTINGS)
    with pytest.raises(ConfigError, match="neither a PEFT adapter nor a folder of them"):
        LLM.load(folder, lora_input_adapters_path=str(tmp_path), **SETTINGS)
    quantized = LLM.load(folder, adapters=[folders / "plain"], quantization="int8", **SETTINGS)
    with pytest.raises(ConfigError, match="load it without, then merge"):
        quantized.merge()
    with pytest.raises(UserError, match="give an adapter for each of 3 prompts, not 2"):
        quantized.generate(ids, adapter=["plain", ""])


@pytest.mark.slow
def test_eight_devices_give_the_logits_of_one(folder, folders, served, ids, tmp_path):
    np.save(tmp_path / "ids.npy", ids[:2])
    paths = map(str, (folder, folders, tmp_path))
    done = run_python("-m", "tests.inference.eight_adapters", *paths, environment=cpu_devices(8))
    assert done.returncode == 0, done.stderr
    for name in KINDS:
        logits = np.load(tmp_path / f"{name}.npy")
        np.testing.assert_allclose(logits, served.logits(ids[:2], name), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_merged_projections_give_the_logits_of_peft(folder, folders, references, ids):
    """As on one GPU; `head` has no adapter on the gate, `plain` none on the keys."""
    plain = LLM.load(folder, **SETTINGS)
    context = replace(plain.context, platform="gpu", capability="9.0")
    adapters = {name: folders / name for name in ("plain", "head")}
    merged = LLM.from_config(plain.config, open_checkpoint(folder), None, context, adapters)
    assert "packed QKV" in str(merged.model.implementations)
    for name in ("plain", "", "head"):
        expected = logits_of(references[name], ids)
        np.testing.assert_allclose(merged.logits(ids, name), expected, rtol=1e-4, atol=1e-4)
    merged.drop_adapter("plain")
    expected = logits_of(references["head"], ids)
    np.testing.assert_allclose(merged.logits(ids), expected, rtol=1e-4, atol=1e-4)
