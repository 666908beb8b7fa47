"""Completions sampled from the weights of a run, against `LLM` and the forward pass."""

import jax
import numpy as np
import pytest

from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ModelWeights, load_weights
from maxtext.common.errors import UserError
from maxtext.inference.llm import LLM
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling_params import SamplingParams
from maxtext.models.transformer import initial_weights, make_template
from maxtext.trainers.rollout import Rollout, RolloutEngine, sample_seed
from maxtext.trainers.run_context import RunContext

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
    return RunContext.from_config(configure("base_num_decoder_layers=2", "scan_layers=true"))


@pytest.fixture(scope="module")
def engine(context):
    return RolloutEngine(context.config, context.template, context.rules)


@pytest.fixture(scope="module")
def weights(context):
    """Large, so that the distributions are far from uniform."""
    return jax.tree.map(lambda leaf: 3.0 * leaf, initial_weights(context.config))


@pytest.fixture(scope="module")
def rollouts(engine, weights):
    engine.sync(weights, len(PROMPTS))
    return engine.generate(requests(logprobs=0))


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
def test_completion_does_not_depend_on_the_others_of_its_batch(engine, weights, rollouts):
    engine.sync(weights, num_requests=1)
    alone = engine.generate(requests(logprobs=0)[2:3])
    assert [rollout.token_ids for rollout in alone] == [rollouts[2].token_ids]


@pytest.mark.slow
def test_other_weights_are_used_after_a_sync_without_compiling(engine, weights, rollouts):
    programs = engine.programs.prefill, engine.programs.decode
    sizes = [program._cache_size() for program in programs]
    engine.sync(jax.tree.map(lambda leaf: 0.5 * leaf, weights), len(PROMPTS))
    others = engine.generate(requests(logprobs=0))
    assert all(a.token_ids != b.token_ids for a, b in zip(rollouts, others, strict=True))
    engine.sync(weights, len(PROMPTS))
    assert engine.generate(requests(logprobs=0)) == rollouts
    assert [program._cache_size() for program in programs] == sizes


@pytest.mark.slow
def test_prefixes_of_earlier_weights_are_not_reused(configure, weights, rollouts):
    config = configure(
        "base_num_decoder_layers=2", "scan_layers=true", "enable_prefix_caching=true",
        "pagedattn_tokens_per_page=2",
    )  # fmt: skip
    context = RunContext.from_config(config)
    engine = RolloutEngine(config, context.template, context.rules)
    engine.sync(jax.tree.map(lambda leaf: 0.5 * leaf, weights), len(PROMPTS))
    engine.generate(requests())
    engine.generate(requests())
    assert engine.engine.prefix_cache.hits > 0
    engine.sync(weights, len(PROMPTS))
    tokens = [rollout.token_ids for rollout in engine.generate(requests())]
    assert tokens == [rollout.token_ids for rollout in rollouts]


@pytest.mark.slow
def test_broken_weights_and_long_prompts_are_refused(engine, weights):
    engine.sync(weights, len(PROMPTS))
    with pytest.raises(UserError, match="3 tokens and 99 new tokens exceed 16"):
        engine.generate(requests(max_new_tokens=99))
    engine.sync(jax.tree.map(lambda leaf: leaf * np.nan, weights), len(PROMPTS))
    with pytest.raises(UserError, match="logits are NaN or infinite"):
        engine.generate(requests())


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
