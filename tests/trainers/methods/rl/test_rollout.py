"""Completions sampled from the weights of a run, against `LLM` and the forward pass."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ModelWeights, load_weights
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.trees import flatten_dict
from maxtext.inference.engine.memory import free_memory
from maxtext.inference.llm import LLM
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.layers.context import BuildContext
from maxtext.models.transformer import initial_weights, make_template
from maxtext.trainers.build import build_run_context
from maxtext.trainers.methods.rl.rollout import Rollout, Sampler, merged_template, sample_seed
from maxtext.trainers.methods.rl.weight_sync import check_synced

PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5], [3], [5, 8, 9, 7])
SEED, STEP = 7, 3


def requests(**params):
    """A request for each prompt, as on-policy training makes them."""
    params = {"temperature": 1.0, "max_new_tokens": 8, **params}
    return [
        GenerationRequest(prompt, SamplingParams(seed=sample_seed(SEED, STEP, index), **params))
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def context(configure):
    return build_run_context(configure("base_num_decoder_layers=2", "scan_layers=true"))


@pytest.fixture(scope="module")
def sampler(context):
    return Sampler(context.config, context.template, context.rules)


@pytest.fixture(scope="module")
def weights(context):
    """Large, so that the distributions are far from uniform."""
    return jax.tree.map(lambda leaf: 3.0 * leaf, initial_weights(context.config))


@pytest.fixture(scope="module")
def rollouts(sampler, weights):
    sampler.sync(weights, len(PROMPTS))
    return sampler.generate(requests(logprobs=0))


@pytest.fixture(scope="module")
def llm(configure, context, weights):
    """The same model with unrolled layers."""
    config = configure("base_num_decoder_layers=2")
    template = make_template(config)
    source = ModelWeights(weights, model_param_infos(context.template, context.config))
    unrolled = load_weights(source, model_param_infos(template, config), template)
    return LLM(config, template, unrolled)


def test_completions_are_those_of_the_model_with_the_same_weights_and_seeds(llm, rollouts):
    completions = {item.index: item for item in llm.completions(requests())}
    for index, rollout in enumerate(rollouts):
        assert rollout.token_ids == completions[index].token_ids
        assert rollout.prompt_ids == tuple(PROMPTS[index])
        assert rollout.finish_reason == completions[index].finish_reason
    assert len({rollout.token_ids for rollout in rollouts}) == len(PROMPTS)


def test_log_probs_are_those_of_the_forward_pass(llm, rollouts):
    for rollout in rollouts:
        ids = rollout.prompt_ids + rollout.token_ids
        logps = jax.nn.log_softmax(llm.logits(np.array(ids[:-1])))
        sampled = np.arange(len(rollout.prompt_ids) - 1, len(ids) - 1)
        expected = logps[sampled, np.array(rollout.token_ids)]
        np.testing.assert_allclose(rollout.log_probs, expected, atol=1e-4)


@pytest.mark.slow
def test_completion_does_not_depend_on_the_others_of_its_batch(sampler, weights, rollouts):
    sampler.sync(weights, num_requests=1)
    alone = sampler.generate(requests(logprobs=0)[2:3])
    assert [rollout.token_ids for rollout in alone] == [rollouts[2].token_ids]


@pytest.mark.slow
def test_other_weights_are_used_after_a_sync_without_compiling(sampler, weights, rollouts):
    programs = sampler.programs.prefill, sampler.programs.decode
    sizes = [program._cache_size() for program in programs]
    sampler.sync(jax.tree.map(lambda leaf: 0.5 * leaf, weights), len(PROMPTS))
    others = sampler.generate(requests(logprobs=0))
    assert all(a.token_ids != b.token_ids for a, b in zip(rollouts, others, strict=True))
    sampler.sync(weights, len(PROMPTS))
    assert sampler.generate(requests(logprobs=0)) == rollouts
    assert [program._cache_size() for program in programs] == sizes


@pytest.mark.slow
def test_prefixes_of_earlier_weights_are_not_reused(configure, weights, rollouts):
    config = configure(
        "base_num_decoder_layers=2", "scan_layers=true", "enable_prefix_caching=true",
        "pagedattn_tokens_per_page=2",
    )  # fmt: skip
    context = build_run_context(config)
    sampler = Sampler(config, context.template, context.rules)
    sampler.sync(jax.tree.map(lambda leaf: 0.5 * leaf, weights), len(PROMPTS))
    sampler.generate(requests())
    sampler.generate(requests())
    assert sampler.engine.prefix_cache.hits > 0
    sampler.sync(weights, len(PROMPTS))
    tokens = [rollout.token_ids for rollout in sampler.generate(requests())]
    assert tokens == [rollout.token_ids for rollout in rollouts]


@pytest.mark.slow
def test_broken_weights_and_long_prompts_are_refused(sampler, weights):
    sampler.sync(weights, len(PROMPTS))
    with pytest.raises(UserError, match="3 tokens and 99 new tokens exceed 16"):
        sampler.generate(requests(max_new_tokens=99))
    sampler.sync(jax.tree.map(lambda leaf: leaf * np.nan, weights), len(PROMPTS))
    with pytest.raises(UserError, match="logits are NaN or infinite"):
        sampler.generate(requests())


def test_row_learns_the_completion_alone():
    row = Rollout((5, 6, 7), (8, 2), log_probs=(), finish_reason="end").row(length=6)
    expected = {
        "inputs": [5, 6, 7, 8, 0, 0],
        "targets": [6, 7, 8, 2, 0, 0],
        "inputs_position": [0, 1, 2, 3, 0, 0],
        "inputs_segmentation": [1, 1, 1, 1, 0, 0],
        "targets_segmentation": [0, 0, 1, 1, 0, 0],
    }
    assert {name: row[name].tolist() for name in expected} == expected


def test_seeds_differ_by_step_prompt_and_sample():
    seeds = {sample_seed(*entropy) for entropy in np.ndindex(2, 3, 4, 5)}
    assert len(seeds) == 2 * 3 * 4 * 5


@pytest.mark.slow
def test_paged_caches_of_a_gpu_sample_the_same(context, sampler, weights, rollouts, monkeypatch):
    assert sampler.paged_programs is None  # this is no GPU
    paged = Sampler(context.config, context.template, context.rules)
    monkeypatch.setattr(BuildContext, "only_platform", "gpu")
    paged.programs = paged.paged_programs
    monkeypatch.undo()
    paged.sync(weights, len(PROMPTS))
    cache_config = paged.engine.cache_config
    assert cache_config.total_blocks == len(PROMPTS) * -(-cache_config.length // 32)
    assert paged.engine.executor.cache_config.block_size == 32
    assert [each.token_ids for each in paged.generate(requests(logprobs=0))] == [
        each.token_ids for each in rollouts
    ]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([], id="base"),
        pytest.param(
            ["lora_rank=4", "lora_alpha=6", "lora_target_modules=[q_proj,v_proj,up_proj]"],
            id="adapters",
        ),
        pytest.param(["attention_bias=true", "base_num_kv_heads=2"], id="biases"),
    ],
)
def test_merged_projections_of_a_gpu_sample_the_same(configure, monkeypatch, keys):
    context = build_run_context(configure("base_num_decoder_layers=2", *keys))
    keys = iter(jax.random.split(jax.random.key(0), 100))
    weights = jax.tree.map(
        lambda leaf: 0.3 * jax.random.normal(next(keys), leaf.shape, leaf.dtype),
        context.template.weights,
    )
    sampler = Sampler(context.config, context.template, context.rules)
    assert merged_template(context.config, context.template, context.rules) is None
    with monkeypatch.context() as patch:
        patch.setattr(BuildContext, "single_gpu_unsupported_reason", lambda context: None)
        merged = merged_template(context.config, context.template, context.rules)
    assert sum("packed_qkv" in path for path in flatten_dict(merged.weights)) >= 2
    sampled = []
    for template in (None, merged):
        sampler.programs = replace(sampler.programs, decode_template=template)
        sampler.sync(weights, len(PROMPTS))
        sampled.append(sampler.generate(requests(logprobs=0)))
    for separate, together in zip(*sampled, strict=True):
        assert separate.token_ids == together.token_ids
        np.testing.assert_allclose(separate.log_probs, together.log_probs, atol=1e-5)


def test_temperature_of_log_probs_is_that_of_sampling(configure, context, weights, llm):
    config = context.config.model_copy(
        update={"use_grpo": True, "decode_sampling_temperature": 2.0, "kv_cache_buffer": 0}
    )
    sampler = Sampler(config, context.template, context.rules)
    sampler.sync(weights, len(PROMPTS))
    for rollout in sampler.generate(requests(logprobs=0, temperature=2.0)):
        ids = rollout.prompt_ids + rollout.token_ids
        logps = jax.nn.log_softmax(llm.logits(np.array(ids[:-1])) / 2.0)
        sampled = np.arange(len(rollout.prompt_ids) - 1, len(ids) - 1)
        expected = logps[sampled, np.array(rollout.token_ids)]
        np.testing.assert_allclose(rollout.log_probs, expected, atol=1e-4)


@pytest.mark.slow
def test_limits_of_the_sampler_change_no_text(context, weights, rollouts):
    limits = {
        "use_grpo": True,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 3,
        "kv_cache_buffer": 5,
        "hbm_utilization_vllm": 0.5,
    }
    sampler = Sampler(context.config.model_copy(update=limits), context.template, context.rules)
    sampler.sync(weights, len(PROMPTS))
    assert sampler.engine.cache_config.slots == 2
    assert sampler.engine.cache_config.length == 16 + 5
    chunks = []
    prefill = sampler.engine.executor.prefill
    sampler.engine.executor.prefill = lambda batch, *rest: (
        chunks.append(int((np.asarray(batch.positions) >= 0).sum())) or prefill(batch, *rest)
    )
    completions = sampler.generate(requests(logprobs=0))
    assert [each.token_ids for each in completions] == [each.token_ids for each in rollouts]
    assert max(chunks) <= 3
    assert sum(chunks) == sum(map(len, PROMPTS))


def test_the_sampler_has_as_many_slots_as_fit(context, weights):
    limits = {"use_grpo": True, "kv_cache_buffer": 5, "max_num_batched_tokens": 3}

    def executor(fraction):
        config = context.config.model_copy(update=limits | {"hbm_utilization_vllm": fraction})
        sampler = Sampler(config, context.template, context.rules)
        sampler.sync(weights, len(PROMPTS))
        return sampler.engine.executor

    one = executor(0.5).total_bytes / len(PROMPTS)
    assert executor(1.5 * one / free_memory(1.0)).cache_config.slots == 1
    with pytest.raises(ConfigError, match="caches for a sequence of 21 tokens need"):
        executor(1e-12)


def test_failed_syncs_are_errors(weights):
    stale = jax.tree.map(lambda leaf: leaf.copy(), weights)
    check_synced(weights, stale)
    flat, structure = jax.tree.flatten(stale)
    flat[3] = flat[3].at[(0,) * flat[3].ndim].add(1e-6)
    with pytest.raises(UserError, match=r"sampler has other values .* in \S+$"):
        check_synced(weights, jax.tree.unflatten(structure, flat))
    with pytest.raises(UserError, match="only one of trainer and sampler has another"):
        check_synced(weights, stale | {"another": flat[0]})
