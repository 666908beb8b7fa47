"""Advantages and the loss of GRPO and its relatives, against their formulas in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxtext import losses
from tests.trainers.losses.compare import assert_same_loss, jax_loss

DRAW = np.random.default_rng(2)
LOGPS = -3 * DRAW.random((4, 6)).astype(np.float32)
OLD = (LOGPS + 0.4 * DRAW.normal(size=LOGPS.shape)).astype(np.float32)
REFERENCE = (LOGPS + 0.3 * DRAW.normal(size=LOGPS.shape)).astype(np.float32)
SAMPLER_WEIGHTS = DRAW.uniform(0.5, 2, LOGPS.shape).astype(np.float32)
ADVANTAGES = np.array([1.5, -0.7, -2.0, 0.4], np.float32)
MASK = np.array([[1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0]])
EMPTY_ROW = MASK * np.array([[1], [0], [1], [1]])


# Advantages.


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [-1.5 / 1.2909944, -0.5 / 1.2909944, 0.5 / 1.2909944, 1.5 / 1.2909944]),
        ("none", [-1.5, -0.5, 0.5, 1.5]),
        ("leave_one_out", [1 - 3, 2 - 8 / 3, 3 - 7 / 3, 4 - 2]),
    ],
)
def test_advantages_of_a_group(scale, expected):
    rewards = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 5.0]  # sample deviation sqrt(5/3)
    found = losses.advantages(rewards, 4, scale=scale, epsilon=0.0)[:4]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_advantages_scaled_by_the_deviation_of_the_batch():
    rewards = torch.tensor([1.0, 2.0, 4.0, 0.0, 7.0, 7.0])
    centered = torch.tensor([-0.5, 0.5, 2.0, -2.0, 0.0, 0.0])
    np.testing.assert_allclose(
        losses.advantages(rewards.numpy(), 2, scale="batch"),
        centered / (rewards.std() + 1e-6),
        rtol=1e-6,
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none", "leave_one_out"])
def test_equal_rewards_have_no_advantage(scale):
    """The float32 mean of three times 0.9 is not 0.9."""
    rewards = np.array([0.9, 0.9, 0.9, 1.0, 2.0, 3.0], np.float32)
    found = losses.advantages(rewards, 3, scale=scale)
    np.testing.assert_array_equal(found[:3], 0)
    assert found[3] < 0 < found[5]


@pytest.mark.parametrize("scale", ["group", "none", "leave_one_out"])
@pytest.mark.slow
def test_unscored_rewards_are_left_out(scale):
    missing = losses.advantages([1.0, np.nan, 2.0, 4.0], 4, scale=scale)
    np.testing.assert_allclose(
        missing[np.array([0, 2, 3])], losses.advantages([1.0, 2.0, 4.0], 3, scale=scale), rtol=1e-6
    )
    assert missing[1] == 0
    np.testing.assert_array_equal(losses.advantages([3.0, np.nan, np.nan, np.nan], 2), 0)


def test_advantages_need_whole_groups_of_two():
    for rewards, num_generations in (([1.0, 2.0], 1), ([1.0, 2.0, 3.0], 2)):
        with pytest.raises(ValueError, match="are not groups"):
            losses.advantages(rewards, num_generations)


def test_degenerate_groups_have_no_advantages():
    groups = losses.degenerate_groups([0.0, 1e-9, 0.0, 0.5, -0.5, 0.0], 2)
    np.testing.assert_array_equal(groups, [True, False, False])


# The loss.


def torch_grpo(
    logps,
    *,
    old=OLD,
    mask=MASK,
    level="token",
    kl="k3",
    kl_correction=False,
    reduce="grpo",
    dual_clip=None,
    weights=None,
    beta=0.1,
):
    """The table of the specification, one line a formula."""
    mask, reference = torch.tensor(mask), torch.tensor(REFERENCE)
    old = logps.detach() if old is None else torch.tensor(old)
    row_tokens = mask.sum(1, keepdim=True)
    mean = ((logps - old) * mask).sum(1, keepdim=True) / row_tokens.clamp(min=1)
    ratio = {
        "token": torch.exp(logps - old),
        "sequence": torch.exp(mean).expand(logps.shape),
        "sequence_token": torch.exp(logps - logps.detach() + mean.detach()),
    }[level]
    advantages = torch.tensor(ADVANTAGES)[:, None]
    bounded = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    loss = -torch.min(bounded * advantages, ratio.clamp(0.9, 1.25) * advantages)
    if weights is not None:
        loss = loss * torch.tensor(weights)
    d = reference - logps
    penalty = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}[kl]
    x = (loss + beta * (penalty * ratio if kl_correction else penalty)) * mask
    num_rows = (row_tokens > 0).sum()
    return {
        "grpo": (x.sum(1) / row_tokens[:, 0].clamp(min=1)).sum() / num_rows,
        "bnpo": x.sum() / mask.sum(),
        "dapo": x.sum() / mask.sum(),
        "dr_grpo": x.sum() / (num_rows * 9),
        "sum": x.sum() / num_rows,
    }[reduce]


def jax_grpo(logps, old=OLD, mask=MASK, beta=0.1, **options):
    return losses.grpo(
        logps,
        old,
        ADVANTAGES,
        mask,
        ref_logps=REFERENCE,
        beta=beta,
        epsilon=0.1,
        epsilon_high=0.25,
        max_length=9,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"reduce": "grpo"},
        {"reduce": "bnpo"},
        {"reduce": "dapo"},
        {"reduce": "dr_grpo"},
        {"reduce": "sum"},
        {"level": "sequence"},
        {"level": "sequence_token"},
        {"kl": "k1", "level": "sequence"},
        {"kl": "k2", "kl_correction": True},
        {"kl_correction": True, "level": "sequence", "reduce": "dapo"},
        {"dual_clip": 1.3},
        {"weights": SAMPLER_WEIGHTS, "reduce": "dapo"},
        {"old": None},
        {"mask": EMPTY_ROW},
        {"mask": EMPTY_ROW, "reduce": "dr_grpo", "level": "sequence"},
    ],
    ids=lambda options: " ".join(
        f"{name}={value}" if isinstance(value, str | float) else name
        for name, value in options.items()
    ),
)
def test_loss_and_gradient_match_formula(options):
    assert_same_loss(
        lambda logps: jax_grpo(logps, **options), lambda logps: torch_grpo(logps, **options), LOGPS
    )


def test_first_pass_has_the_gradient_of_the_policy():
    """Without old log-probabilities the ratio is 1: dloss/dlogps = −A / (row's tokens · rows)."""
    _, (gradient,), metrics = jax_loss(lambda x: jax_grpo(x, old=None, beta=0.0), LOGPS)
    expected = -ADVANTAGES[:, None] * MASK / MASK.sum(1, keepdims=True) / 4
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    assert metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0


def test_clip_ratios_and_kl():
    ratios = np.array([[0.5, 1.0, 1.5, 9.0], [0.5, 0.6, 1.5, 1.0]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    old = np.full((2, 4), -1.0)
    _, metrics = losses.grpo(
        old + np.log(ratios), old, np.array([1.0, -1.0]), mask, ref_logps=old + np.log(ratios) + 1
    )
    np.testing.assert_allclose(metrics["clip_ratio/high"], 1 / 7, rtol=1e-6)  # 1.5 of the first row
    np.testing.assert_allclose(
        metrics["clip_ratio/low"], 2 / 7, rtol=1e-6
    )  # 0.5, 0.6 of the second
    np.testing.assert_allclose(metrics["kl"], np.e - 2, rtol=1e-6)


def test_clip_ratio_of_sequences_counts_rows():
    old = np.zeros((3, 2))
    logps = np.log([[1.5, 1.5], [0.5, 0.5], [7.0, 7.0]])
    mask = np.array([[1, 1], [1, 1], [0, 0]])
    _, metrics = losses.grpo(logps, old, np.array([1.0, -1.0, 1.0]), mask, level="sequence")
    assert metrics["clip_ratio/high"] == metrics["clip_ratio/low"] == 0.5


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_extreme_log_probabilities_give_finite_gradients(level):
    is_unlikely = np.ones((4, 6)) * np.array([[0], [1], [0], [1]])
    logps, old = -1e4 * is_unlikely, -1e4 * (1 - is_unlikely)
    loss, (gradient,), metrics = jax_loss(
        lambda x: losses.grpo(
            x,
            old,
            np.array([1.0, 1.0, -1.0, -1.0]),
            np.ones((4, 6)),
            ref_logps=old,
            beta=0.1,
            level=level,
        ),
        logps,
    )
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_masked_values_do_not_reach_the_gradient(level):
    hole = np.where(MASK == 1, 0, np.nan)
    options = {"level": level, "kl_correction": True}
    expected_loss, (expected,), _ = jax_loss(lambda x: jax_grpo(x, **options), LOGPS)
    loss, (gradient,), _ = jax_loss(
        lambda x: jax_grpo(x, old=OLD + hole, weights=SAMPLER_WEIGHTS * 0 + 1, **options),
        LOGPS + hole,
    )
    assert loss == expected_loss
    np.testing.assert_array_equal(gradient, expected)


def test_loss_without_learned_tokens_is_zero():
    for reduce in ("grpo", "bnpo", "dapo", "dr_grpo", "sum"):
        loss, (gradient,), _ = jax_loss(
            lambda x, r=reduce: jax_grpo(x, mask=MASK * 0, reduce=r), LOGPS
        )
        assert loss == 0
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("reduce", ["grpo", "dapo", "dr_grpo", "sum"])
def test_microbatches_sum_to_the_batch(reduce):
    def run(some, **counts):
        loss, metrics = losses.grpo(
            LOGPS[some],
            OLD[some],
            ADVANTAGES[some],
            EMPTY_ROW[some],
            ref_logps=REFERENCE[some],
            beta=0.1,
            reduce=reduce,
            max_length=9,
            **counts,
        )
        return {"loss": loss, **metrics}

    whole = run(slice(None))
    counts = {"rows": 3, "tokens": EMPTY_ROW.sum()}
    first, second = run(slice(0, 2), **counts), run(slice(2, 4), **counts)
    for name, value in whole.items():
        np.testing.assert_allclose(first[name] + second[name], value, rtol=1e-5, err_msg=name)


def test_bfloat16_inputs_are_computed_in_float32():
    rounded = [jnp.asarray(array, jnp.bfloat16) for array in (LOGPS, OLD, REFERENCE)]
    exact = [np.asarray(array, np.float32) for array in rounded]
    found = losses.grpo(rounded[0], rounded[1], ADVANTAGES, MASK, ref_logps=rounded[2], beta=0.1)
    wanted = losses.grpo(exact[0], exact[1], ADVANTAGES, MASK, ref_logps=exact[2], beta=0.1)
    assert found[0].dtype == jnp.float32
    assert found[0] == wanted[0]


def test_compiles_with_a_traced_beta():
    compiled = jax.jit(lambda logps, beta: jax_grpo(logps, beta=beta)[0])
    expected = torch_grpo(torch.tensor(LOGPS, dtype=torch.float64), beta=0.3)
    np.testing.assert_allclose(compiled(LOGPS, 0.3), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("level='word' is not one of token", {"level": "word"}),
        ("kl='k4' is not one of k1", {"kl": "k4"}),
        ("reduce='mean' is not one of grpo", {"reduce": "mean"}),
        ("needs max_length", {"reduce": "dr_grpo"}),
        ("give ref_logps", {"beta": 0.1}),
        ("dual_clip=1.1 is not above", {"dual_clip": 1.1}),
    ],
)
def test_rejects_contradicting_options(message, options):
    with pytest.raises(ValueError, match=message):
        losses.grpo(LOGPS, OLD, ADVANTAGES, MASK, **options)


# The correction for the sampler.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0.5, 1.5, 2.0], [2.0, 2.0, 1.0]]),
        ({"mode": "mask"}, [[0.5, 1.5, 0.0], [0.0, 0.0, 1.0]]),
        ({"level": "sequence", "maximum": 3.0}, [[2.25], [3.0]]),
        ({"level": "sequence", "mode": "mask", "maximum": 3.0}, [[2.25], [0.0]]),
    ],
)
def test_sampler_weights(options, expected):
    ratios = np.array([[0.5, 1.5, 3.0], [4.0, 5.0, np.nan]])
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    found = losses.sampler_weights(np.log(ratios) - 1, np.full((2, 3), -1.0), mask, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
