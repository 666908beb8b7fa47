"""The loss of a batch of rollouts for each key that changes it, against NumPy."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.trainers.methods.rl import grpo
from maxtext.trainers.methods.rl.grpo import GRPOObjective

ROWS, LENGTH, PROMPT = 8, 12, 4
ALL_KEYS = [
    "use_grpo=true", "dataset_type=hf", "packing=false", "decode_sampling_strategy=weighted",
    "num_generations=4", "batch_size=2", "train_micro_batch_size=1", "grpo_beta=0.3",
    f"max_target_length={LENGTH}", f"max_prefill_predict_length={PROMPT}", "num_test_batches=0",
]  # fmt: skip
OLD = ("num_iterations=2",)  # the policy differs from the sampler
OFF_POLICY = ("use_agentic_rollout=true", "off_policy_steps=1")


@dataclass(frozen=True)
class ArrayPolicy(GRPOObjective):
    """Takes log-probabilities from the batch instead of a model's output."""

    def token_logps(self, template, weights, batch, key):
        return batch[weights], batch["entropy"], {}

    def reference_model(self, weights, reference):
        return None, "reference"


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    ends = rng.integers(5, LENGTH + 1, ROWS)
    sampled = (np.arange(LENGTH) >= 3) & (np.arange(LENGTH) < ends[:, None])
    logps = {
        name: -rng.uniform(0.2, 2, shape).astype(np.float32)
        for name in ("policy", "reference", "entropy", "sampler", "old")
    }
    return logps | {
        "targets_segmentation": sampled.astype(np.int32),
        "advantages": rng.standard_normal(ROWS).astype(np.float32),
        "is_trained_on": np.array([1, 1, 0, 1, 1, 1, 1, 1], np.float32),
        "row_index": np.arange(ROWS, dtype=np.float32),
    }


def computed(batch, *keys):
    """The loss and the metrics as a step computes them, from two microbatches."""
    config = load(None, [*ALL_KEYS, *keys], environ={}, devices=Devices(1))
    objective = ArrayPolicy(config, None, base_template=None)
    arrays = {name: jnp.asarray(value) for name, value in batch.items()}
    arrays["sampler_logps"] = arrays["sampler"][..., None]
    if grpo.needs_old_logps(config):
        arrays["old_logps"] = arrays["old"][..., None]
    counts = objective.counts(arrays)
    totals = {}
    for part in range(2):
        rows = {name: value[part::2] for name, value in arrays.items()}
        losses = objective.losses("policy", None, rows, None, 0)
        for name, value in (losses.sums | losses.metrics).items():
            totals[name] = totals.get(name, 0.0) + np.asarray(value / counts[name])
    return totals


def expected(batch, reduction, old=None, kl=None, dual=None, weights=1.0, corrected=False):
    """The loss in NumPy, for beta 0.3 and epsilon 0.2."""
    mask = (batch["targets_segmentation"] != 0) * batch["is_trained_on"][:, None]
    policy = batch["policy"].astype(float)
    ratio = np.exp(policy - (policy if old is None else batch[old]))
    advantage = batch["advantages"][:, None]
    bounded = ratio if dual is None else np.minimum(ratio, dual)
    policy_loss = -np.minimum(bounded * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    d = batch["reference"] - policy
    divergence = {None: np.exp(d) - d - 1, "k1": -d, "k2": d**2 / 2}[kl]
    x = policy_loss * weights + 0.3 * divergence * (ratio if corrected else 1)
    return reduction(x, mask)


def row_means(x, mask):
    rows = mask.any(axis=1)
    return ((x * mask)[rows].sum(1) / mask[rows].sum(1)).mean()


def by_microbatch(x, mask):
    return np.mean([(x * mask)[i::2].sum() / mask[i::2].sum() for i in range(2)])


REDUCTIONS = {
    "sequence-mean-token-mean": row_means,
    "token-mean": lambda x, mask: (x * mask).sum() / mask.sum(),
    "micro-batch-token-mean": by_microbatch,
    "sequence-mean-token-scale": lambda x, mask: (x * mask).sum() / 7 / (LENGTH - PROMPT),
    "sequence-mean": lambda x, mask: (x * mask).sum() / 7,  # 7 rows are trained on
}


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_reductions_over_microbatches(batch, mode):
    found = computed(batch, f"loss_agg_mode={mode}", *OLD)["policy_loss"]
    assert found == pytest.approx(expected(batch, REDUCTIONS[mode], old="sampler"), rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ((), {}),  # on policy, the ratio is 1
        (("kl_estimator=k1",), {"kl": "k1"}),
        (("kl_estimator=k2",), {"kl": "k2"}),
        (("kl_correction=true", *OLD), {"corrected": True, "old": "sampler"}),
        (("dual_clip=1.3", *OLD), {"dual": 1.3, "old": "sampler"}),
        (OFF_POLICY, {"old": "sampler"}),
    ],
)
def test_options_of_the_loss(batch, keys, options):
    found = computed(batch, *keys)["policy_loss"]
    assert found == pytest.approx(expected(batch, row_means, **options), rel=1e-5)


@pytest.mark.parametrize("keys", [(), OFF_POLICY, OLD])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate"])
def test_corrections_for_the_sampler(batch, mode, keys):
    """The trainer with the weights that sampled: the policy itself, or the old log-probabilities
    that it computed before the first update."""
    level, action = mode.split("_")
    mask = (batch["targets_segmentation"] != 0) * batch["is_trained_on"][:, None]
    old = "old" if keys is OLD else None
    difference = (batch[old or "policy"] - batch["sampler"]).astype(float) * mask
    weights = np.exp(difference.sum(1, keepdims=True) if level == "sequence" else difference)
    weights = np.minimum(weights, 1.5) if action == "truncate" else weights * (weights <= 1.5)
    found = computed(batch, f"sampler_correction={mode}", "sampler_correction_cap=1.5", *keys)
    assert found["policy_loss"] == pytest.approx(
        expected(batch, row_means, weights=weights, old=old), rel=1e-5
    )


def test_metrics_name_the_largest_difference_of_each_row(batch):
    found = computed(batch)
    sampled = batch["targets_segmentation"] != 0
    differences = np.where(sampled, batch["policy"] - batch["sampler"], 0)
    positions = np.abs(differences).argmax(axis=1)
    np.testing.assert_array_equal(found["row_logp_position"], positions)
    largest = differences[np.arange(ROWS), positions]
    np.testing.assert_allclose(found["row_logp_difference"], largest, rtol=1e-6)
    mean = np.abs(differences).sum() / sampled.sum()
    assert found["sampling/logp_difference_mean"] == pytest.approx(mean, rel=1e-5)
    entropy = (batch["entropy"] * sampled).sum() / sampled.sum()
    assert found["entropy"] == pytest.approx(entropy, rel=1e-5)
