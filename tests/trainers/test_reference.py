"""The reference of DPO and GRPO computes what the policy of step 0 does, for every family. In
bfloat16 it stores matrices in the compute dtype, and all other weights as the policy does."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common.trees import flatten_dict
from maxtext.input_pipeline import FIELDS
from maxtext.trainers.checkpointing.init_state import initial_weights, with_reference
from maxtext.trainers.compilation.compile import compile_train_step
from maxtext.trainers.methods.preference.objective import REFERENCE_LOGPS
from maxtext.trainers.methods.preference.reference_logps import compile_reference
from maxtext.trainers.methods.rl.rollout_step import compile_score
from tests.support.training_families import FAMILIES, INDEXED
from tests.trainers.conftest import LENGTH, ROWS, VOCABULARY

DPO = ("use_dpo=true", "packing=false", "dpo_beta=0.5", "remat_policy=full")
GRPO = (
    "use_grpo=true", "dataset_type=hf", "packing=false", "decode_sampling_strategy=weighted",
    "num_generations=4", "batch_size=2", "train_micro_batch_size=2", "grpo_beta=0.3",
    "max_prefill_predict_length=4", "num_test_batches=0", "num_iterations=2",
    "sampler_correction=token_truncate", "remat_policy=full",
)  # fmt: skip
MODELS = {name: (f"decoder_block={name}", *keys) for name, keys in FAMILIES.items()} | {
    "indexer": tuple(key for key in INDEXED if not key.startswith(("indexer_loss", "opt_type"))),
    "memories": (
        "decoder_block=llama2", "base_num_decoder_layers=2", "mhc_expansion_rate=2",
        "engram_layers=[1]", "engram_vocab_bases=[23,23]", "engram_head_dim=4",
        "engram_num_heads=2",
    ),
}  # fmt: skip


def stir_vectors(weights):
    """New norms, biases, decays and sinks, which bfloat16 would round; and copies of all others."""
    random = np.random.default_rng(0)

    def stir(leaf):
        noise = 0.2 * random.standard_normal(leaf.shape) if leaf.ndim < 2 else 0
        return jnp.copy(leaf + jnp.asarray(noise, leaf.dtype))

    return jax.tree.map(stir, weights)


def random_pairs():
    random, positions = np.random.default_rng(3), np.arange(LENGTH)
    batch = {}
    for side in ("chosen", "rejected"):
        mask = positions < random.integers(8, LENGTH + 1, (ROWS, 1))
        ids = random.integers(1, VOCABULARY, (ROWS, LENGTH + 1))
        fields = {
            "inputs": ids[:, :-1], "targets": ids[:, 1:],
            "inputs_position": positions, "targets_position": positions,
            "inputs_segmentation": mask, "targets_segmentation": positions >= 5,
        }  # fmt: skip
        batch |= {
            f"{side}_{name}": (field * mask).astype(np.int32) for name, field in fields.items()
        }
    return jax.device_put(batch)


def first_step(bench, batch):
    """The reference, and the metrics of the first step as a run compiles it."""
    context = bench.context
    has_adapters = context.config.lora_rank > 0
    initial = initial_weights(context) if has_adapters else bench.state.weights
    weights = stir_vectors(initial)
    state = with_reference(context, context.state_from_weights(weights), 0, None)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, state.reference)
    if context.config.precompute_reference_logps:
        logps = compile_reference(context, ROWS)(state.weights, batch)
        batch = batch | dict(zip(REFERENCE_LOGPS, logps, strict=True))
    _, metrics = compile_train_step(context, ROWS)(state, batch, context.key)
    return dtypes, {name: np.asarray(value).max() for name, value in metrics.items()}


def check_first_step(metrics):
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(metrics["rewards/chosen"]) < 1e-6
    assert metrics["logps/chosen"] < -1


@pytest.mark.representative("gpt_oss-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_first_loss_is_log_2(dtype, name, make_bench):
    bench = make_bench(*MODELS[name], *DPO, f"dtype={dtype}")
    dtypes, metrics = first_step(bench, random_pairs())
    check_first_step(metrics)
    for path, stored in flatten_dict(dtypes).items():
        is_matrix = path[-1] in ("embedding", "table") or (
            path[-1] == "weight" and path[-2] not in ("router", "indexer")
        )
        if not is_matrix:
            assert stored == "float32", path  # norms, biases, decays, sinks
    assert flatten_dict(dtypes)["embedder", "embedding"] == dtype


@pytest.mark.representative("llama4")
@pytest.mark.parametrize("name", MODELS)
def test_first_loss_is_log_2_without_remat(name, make_bench):
    """Activations that the backward pass takes are outputs of other fusions than in the reference,
    which must not leave out a rounding."""
    keys = [key for key in DPO if not key.startswith("remat_policy")]
    bench = make_bench(*MODELS[name], *keys, "remat_policy=none", "dtype=bfloat16")
    check_first_step(first_step(bench, random_pairs())[1])


@pytest.mark.representative("precomputed")
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("precompute_reference_logps=true",), id="precomputed"),
        pytest.param(("lora_rank=2",), id="LoRA"),
        pytest.param(("lora_rank=2", "lora_weight_qtype=int8"), id="QLoRA"),
        pytest.param(("quantization=int8",), id="quantized"),
        pytest.param(("logits_via_embedding=true", "logits_dot_in_fp32=true"), id="tied"),
        pytest.param(("scan_layers=true", "gradient_accumulation_steps=2"), id="microbatches"),
    ],
)
def test_first_loss_is_log_2_however_the_reference_is_stored(keys, make_bench):
    bench = make_bench(
        "decoder_block=llama2", "base_num_decoder_layers=2", *DPO, "dtype=bfloat16", *keys
    )
    _, metrics = first_step(bench, random_pairs())
    check_first_step(metrics)


def test_first_kl_of_rollouts_is_0(make_bench):
    """k3 of GRPO; and the ratio to the log-probabilities of the weights that sampled is 1."""
    bench = make_bench(*MODELS["gpt_oss"], *GRPO, "dtype=bfloat16")
    pairs = random_pairs()
    batch = {name: pairs[f"chosen_{name}"] for name in FIELDS}
    score = compile_score(bench.context)
    weights = stir_vectors(bench.state.weights)
    old = score(weights, batch)[..., None]
    rows = {
        "sampler_logps": old, "old_logps": old, "advantages": np.ones(ROWS, np.float32),
        "is_trained_on": np.ones(ROWS, np.float32), "row_index": np.arange(ROWS, dtype=np.float32),
    }  # fmt: skip
    _, metrics = first_step(bench, batch | jax.device_put(rows))
    assert abs(metrics["kl"]) < 1e-9
    assert metrics["row_logp_difference"] < 1e-6
    assert metrics["policy_loss"] == pytest.approx(-1, abs=1e-6)
