"""The sampler and the trainer give the same log-probabilities, in families whose engine runs other
code than training: windows, experts, latent attention and recurrent layers."""

import jax
import numpy as np
import pytest

from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.models.transformer import initial_weights
from maxtext.trainers.build import build_run_context
from maxtext.trainers.data_loader import to_devices
from maxtext.trainers.methods.rl.rollout import Sampler
from maxtext.trainers.methods.rl.rollout_step import rollout_fields
from tests.support.training_configurations import CONFIGURATIONS

FAMILIES = {
    "gemma3": "windows",
    "mistral": "dense",
    "mixtral": "experts",
    "gpt_oss": "windows, experts and sinks",
    "deepseek": "latent attention and experts",
    "qwen3_next": "Gated DeltaNet",
    "qwen3_5 experts": "Gated DeltaNet and experts",
    "llama4": "chunks",
}
LENGTH, TEMPERATURE = 16, 0.7
PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5, 8])
RUN = (
    "use_grpo=true", "dataset_type=hf", "packing=false", "decode_sampling_strategy=weighted",
    f"decode_sampling_temperature={TEMPERATURE}", "num_generations=3", "batch_size=1",
    "max_prefill_predict_length=8", f"max_target_length={LENGTH}", "kv_cache_buffer=0",
    "dtype=float32", "matmul_precision=highest", "num_test_batches=0", "attention=dot_product",
    "vocab_size=29",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.representative("gemma3")
@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_trainer_agree(family, configure):
    keys = CONFIGURATIONS[family]
    if "attention_type" in keys:  # latent attention has a key of each head, and no head_dim
        keys = keys | {"base_num_kv_heads": 4, "head_dim": 128}
    settings = [f"{key}={value}" for key, value in keys.items() if key != "architecture"]
    if "architecture" in keys:
        settings.append(f"architecture={keys['architecture']}")
    context = build_run_context(configure(*RUN, *settings))
    weights = jax.tree.map(lambda leaf: 2.0 * leaf, initial_weights(context.config))
    sampler = Sampler(context.config, context.template, context.rules)
    sampler.sync(weights, 2)  # fewer slots than requests
    params = dict(temperature=TEMPERATURE, max_new_tokens=8, logprobs=0)
    rollouts = sampler.generate(
        [
            GenerationRequest(prompt, SamplingParams(seed=seed, **params))
            for seed, prompt in enumerate(PROMPTS)
        ]
    )
    batch = rollout_fields(rollouts, LENGTH)
    score = jax.jit(context.objective.score)
    trainer = np.asarray(score(weights, to_devices(context, batch)))
    is_sampled = batch["targets_segmentation"] != 0
    for row, rollout in enumerate(rollouts):
        np.testing.assert_allclose(rollout.log_probs, trainer[row, is_sampled[row]], atol=2e-3)
