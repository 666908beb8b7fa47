"""Prompts that an update computes once for all completions of a group, against whole rows."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.models.transformer import initial_weights, make_template
from maxtext.trainers.methods.rl.grpo import GRPOObjective
from maxtext.trainers.methods.rl.prompt_loader import (
    common_lengths,
    group_microbatches,
    shared_prefix,
)
from maxtext.trainers.methods.rl.rollout import Rollout
from maxtext.trainers.methods.rl.rollout_step import rollout_fields, token_field
from maxtext.trainers.step import split_rows

GENERATIONS, LENGTH, PROMPT = 4, 16, 8
TINY = [
    "use_grpo=true", "dataset_type=hf", "packing=false", "decode_sampling_strategy=weighted",
    f"num_generations={GENERATIONS}", "batch_size=2", "grpo_beta=0", "num_test_batches=0",
    f"max_target_length={LENGTH}", f"max_prefill_predict_length={PROMPT}", "dtype=float32",
    "matmul_precision=highest", "attention=dot_product", "base_emb_dim=16", "base_mlp_dim=24",
    "base_num_decoder_layers=2", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8",
    "vocab_size=32", "scan_layers=false", "remat_policy=full",
]  # fmt: skip


def configured(*keys):
    settings = dict(setting.split("=") for setting in [*TINY, *keys])
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load(None, overrides, environ={}, devices=Devices(1))


def make_batch(rng, prompt_lengths):
    rollouts = []
    for length in prompt_lengths:
        prompt = tuple(rng.integers(0, 32, length).tolist())
        for _ in range(GENERATIONS):
            count = int(rng.integers(1, LENGTH - length + 1))
            completion = tuple(rng.integers(0, 32, count).tolist())
            logps = tuple(-rng.uniform(2, 4, count))
            rollouts.append(Rollout(prompt, completion, logps, "length"))
    fields = rollout_fields(rollouts, LENGTH)
    is_sampled = fields["targets_segmentation"] != 0
    rows = len(rollouts)
    return fields | {
        "sampler_logps": token_field([each.log_probs for each in rollouts], is_sampled),
        "advantages": rng.standard_normal(rows).astype(np.float32),
        "is_trained_on": np.ones(rows, np.float32),
        "row_index": np.arange(rows, dtype=np.float32),
    }


@pytest.mark.parametrize(
    "keys",
    [
        ["decoder_block=llama2", "num_iterations=2", "num_vocab_tiling=4"],
        ["decoder_block=gemma3", "sliding_window_size=4", "decode_sampling_temperature=0.7"],
    ],
    ids=["tiles of logits", "windows"],
)
def test_loss_and_gradients_are_those_of_whole_rows(keys):
    config = configured(*keys)
    template = make_template(config)
    weights = jax.jit(lambda: initial_weights(config))()
    batch = make_batch(np.random.default_rng(0), [5, 8])

    def results(prefix):
        objective = GRPOObjective(config, template, base_template=template, shared_prefix=prefix)

        def loss(weights):
            losses = objective.losses(weights, None, batch, None, 0)
            return losses.sums["policy_loss"], losses.metrics

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)

    jax.tree.map(
        lambda actual, expected: np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6),
        results(3),
        results(0),
    )


@pytest.mark.parametrize(
    ("prompt_lengths", "keys", "expected"),
    [
        ([33, 64], [], 31),  # multiples of 8, an eighth of max_prefill_predict_length, less one
        ([31, 64], [], 23),
        ([64], [], 63),  # the last token of a prompt is not shared
        ([7, 64], [], 0),
        ([64], ["num_vocab_tiling=32"], 63),  # 64 tokens with targets are in tiles of 2
        ([60], ["num_vocab_tiling=32"], 31),  # 96 in tiles of 3
        ([64], ["train_micro_batch_size=1", "num_generations=8"], 63),
        ([64], ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2"], 0),
        ([64], ["quantization=int8"], 0),
        ([64], ["decoder_block=qwen3_next"], 0),
        ([64], ["decoder_block=qwen3_custom_moe"], 0),
        ([64], ["decoder_block=simple"], 0),
    ],
)
def test_length_is_one_of_few_that_all_prompts_exceed(prompt_lengths, keys, expected):
    config = configured(*keys, "max_prefill_predict_length=64", "max_target_length=128")
    context = SimpleNamespace(config=config, rules=SimpleNamespace(mesh=SimpleNamespace(size=1)))
    assert shared_prefix(context, prompt_lengths) == expected


def test_rows_of_a_group_are_on_one_device():
    config = configured()
    context = SimpleNamespace(config=config, rules=SimpleNamespace(mesh=SimpleNamespace(size=8)))
    assert shared_prefix(context, [8]) == 0


def test_microbatches_have_whole_groups():
    rows = np.arange(12) // 3  # the group of each row
    grouped = group_microbatches({"rows": rows}, microbatches=2)["rows"]
    np.testing.assert_array_equal(split_rows(grouped, 2), [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]])


def test_prompts_of_a_group_may_differ():
    """Environments decide how a conversation begins."""
    prompts = [(1, 2, 3), (1, 2, 3), (4, 5, 6, 7), (4, 5, 9), (1,), (2,)]
    assert common_lengths(prompts, 2) == [3, 2, 0]
    assert common_lengths([(1, 2, 8), (1, 2), (1, 2, 3)], 3) == [2]
