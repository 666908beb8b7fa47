"""Losses against those of TRL, whose trainers compute them from log-probabilities or logits."""

import types
from collections import defaultdict

import numpy as np
import pytest
import torch

from maxtext import losses
from tests.trainers.losses.compare import jax_loss

pytestmark = pytest.mark.slow  # importing TRL takes several seconds
DRAW = torch.Generator().manual_seed(4)
PAIRS, LENGTH = 4, 6
MASK = (torch.arange(LENGTH) < torch.tensor([6, 3, 2, 5, 4, 6, 1, 3])[:, None]).long()
LOGPS = (torch.randn(2 * PAIRS, LENGTH, generator=DRAW) - 2) * MASK  # chosen, then rejected
REFERENCE = LOGPS.sum(1) + torch.randn(2 * PAIRS, generator=DRAW)


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl")


def fake_trainer(**options):
    """The attributes of a trainer that its loss reads."""
    accelerator = types.SimpleNamespace(
        device="cpu",
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    shared = dict(accelerator=accelerator, model=types.SimpleNamespace(training=True))
    metrics = {"train": defaultdict(list)}
    return types.SimpleNamespace(**shared, _metrics=metrics, aux_loss_enabled=False, **options)


def trl_dpo(trl, loss_type, label_smoothing):
    leaf = LOGPS.clone().requires_grad_()
    trainer = fake_trainer(
        beta=0.3,
        label_smoothing=label_smoothing,
        loss_types=[loss_type],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    zeros = torch.zeros_like(leaf)
    output = types.SimpleNamespace(
        log_probs=leaf, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    prompt = torch.zeros(2 * PAIRS, 1, dtype=torch.long)
    inputs = {
        "input_ids": torch.zeros(2 * PAIRS, LENGTH + 1, dtype=torch.long),
        "attention_mask": torch.cat([prompt + 1, MASK], 1),
        "completion_mask": torch.cat([prompt, MASK], 1),
        "ref_chosen_logps": REFERENCE[:PAIRS],
        "ref_rejected_logps": REFERENCE[PAIRS:],
    }
    loss = trl.DPOTrainer._compute_loss(trainer, lambda **_: output, inputs, False)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), leaf.grad[:, 0], metrics


@pytest.mark.parametrize(
    ("loss_type", "label_smoothing"),
    [
        ("sigmoid", 0.0),
        ("hinge", 0.0),
        ("ipo", 0.0),
        ("robust", 0.2),
        ("apo_zero", 0.0),
        ("apo_down", 0.0),
    ],
)
def test_preference_losses(trl, loss_type, label_smoothing):
    expected, expected_gradient, expected_metrics = trl_dpo(trl, loss_type, label_smoothing)
    lengths = MASK.sum(1).numpy()
    loss, (gradient,), metrics = jax_loss(
        lambda sums: losses.dpo(
            sums[:PAIRS],
            sums[PAIRS:],
            REFERENCE[:PAIRS].numpy(),
            REFERENCE[PAIRS:].numpy(),
            beta=0.3,
            label_smoothing=label_smoothing,
            loss_type=loss_type,
            chosen_lengths=lengths[:PAIRS],
            rejected_lengths=lengths[PAIRS:],
        ),
        LOGPS.sum(1),
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected_metrics[name], rtol=1e-5, err_msg=name)


def test_simpo(trl):
    from trl.experimental.cpo import CPOTrainer

    trainer = fake_trainer(
        alpha=0.0, beta=2.0, simpo_gamma=0.7, label_smoothing=0.1, loss_type="simpo"
    )
    lengths = MASK.sum(1)
    means = LOGPS.sum(1) / lengths
    values, chosen, rejected = CPOTrainer.cpo_loss(trainer, means[:PAIRS], means[PAIRS:])
    loss, metrics = losses.dpo(
        LOGPS.sum(1)[:PAIRS].numpy(),
        LOGPS.sum(1)[PAIRS:].numpy(),
        beta=2.0,
        gamma=0.7,
        label_smoothing=0.1,
        loss_type="simpo",
        chosen_lengths=lengths[:PAIRS].numpy(),
        rejected_lengths=lengths[PAIRS:].numpy(),
    )
    np.testing.assert_allclose(loss, values.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rewards/chosen"], chosen.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rewards/rejected"], rejected.mean(), rtol=1e-5)


def test_orpo(trl):
    from trl.experimental.orpo import ORPOTrainer

    sides = (-torch.rand(2, 5, generator=DRAW) * 3 - 0.05).requires_grad_()
    values, _, _, ratio, odds = ORPOTrainer.odds_ratio_loss(fake_trainer(beta=0.2), *sides)
    expected = 1.25 - values.mean()
    expected.backward()
    loss, (gradient,), metrics = jax_loss(
        lambda both: losses.orpo(both[0], both[1], 1.25, weight=0.2), sides.detach()
    )
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient, sides.grad, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(metrics["log_odds_ratio"], ratio.item(), rtol=1e-5)
    np.testing.assert_allclose(metrics["log_odds_chosen"], odds.item(), rtol=1e-5)


OLD = LOGPS + 0.4 * torch.randn(LOGPS.shape, generator=DRAW)
REF_LOGPS = LOGPS + 0.3 * torch.randn(LOGPS.shape, generator=DRAW)
ADVANTAGES = torch.randn(2 * PAIRS, generator=DRAW)


def trl_grpo(trl, reduce, level, delta, kl_correction, weights=None):
    leaf = LOGPS.clone().requires_grad_()
    trainer = fake_trainer(
        loss_type={"sum": "luspo"}.get(reduce, reduce),
        importance_sampling_level=level,
        beta=0.1,
        epsilon_low=0.2,
        epsilon_high=0.28,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=9,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        args=types.SimpleNamespace(
            use_bias_correction_kl=kl_correction, delta=delta, steps_per_generation=1
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
    )
    prompt = torch.ones(2 * PAIRS, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": MASK * 0,
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REF_LOGPS,
        "num_items_in_batch": MASK.sum(),
        "importance_sampling_ratio": weights,
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), leaf.grad, metrics


def our_grpo(**options):
    return jax_loss(
        lambda logps: losses.grpo(
            logps,
            OLD.numpy(),
            ADVANTAGES.numpy(),
            MASK.numpy(),
            ref_logps=REF_LOGPS.numpy(),
            beta=0.1,
            epsilon=0.2,
            epsilon_high=0.28,
            **options,
        ),
        LOGPS,
    )


@pytest.mark.parametrize(
    ("reduce", "level", "dual_clip", "kl_correction"),
    [
        ("grpo", "token", None, False),
        ("bnpo", "token", 1.4, False),
        ("dapo", "token", None, True),
        ("dr_grpo", "token", None, False),
        ("grpo", "sequence", None, True),
        ("sum", "sequence", None, False),
    ],
)
def test_grpo(trl, reduce, level, dual_clip, kl_correction):
    expected, expected_gradient, expected_metrics = trl_grpo(
        trl, reduce, level, dual_clip, kl_correction
    )
    loss, (gradient,), metrics = our_grpo(
        dual_clip=dual_clip, level=level, kl_correction=kl_correction, reduce=reduce, max_length=9
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    for name in ("clip_ratio/low", "clip_ratio/high"):
        np.testing.assert_allclose(metrics[name], expected_metrics[f"{name}_mean"], rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"], expected_metrics["kl"], rtol=1e-5)


@pytest.mark.parametrize("reduce", ["grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_correction_for_the_sampler(trl, reduce, level, mode):
    """TRL computes the ratio of trainer and sampler where it samples; this is its formula."""
    sampler = OLD + 0.3 * torch.randn(OLD.shape, generator=torch.Generator().manual_seed(5))
    difference = (OLD - sampler) * MASK
    if level == "sequence":
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    maximum = 1.2
    ratio = ratio.clamp(max=maximum) if mode == "truncate" else ratio * (ratio <= maximum)
    expected, expected_gradient, _ = trl_grpo(trl, reduce, "token", None, False, ratio)
    weights = losses.sampler_weights(
        OLD.numpy(), sampler.numpy(), MASK.numpy(), level=level, mode=mode, maximum=maximum
    )
    loss, (gradient,), _ = our_grpo(reduce=reduce, weights=weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_generalized_divergence(trl, beta):
    from trl.experimental.gkd import GKDTrainer

    student, teacher = torch.randn(2, 8, 6, 17, generator=DRAW) * 2
    leaf = student.clone().requires_grad_()
    expected = GKDTrainer.generalized_jsd_loss(
        leaf, teacher, labels=torch.where(MASK == 1, 0, -100), beta=beta, temperature=1.5
    )
    expected.backward()
    loss, (gradient,), _ = jax_loss(
        lambda x: (
            losses.divergence(x, teacher.numpy(), MASK.numpy(), beta=beta, temperature=1.5),
            {},
        ),
        student,
    )
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-4, atol=1e-7)
