"""Non-finite losses end the run with the weights of the last finite step; spikes are skipped."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from maxtext.trainers.hooks import Profile, TrainingFailed

# Two products a layer: quick to compile, and as good as any model at losing its loss.
SMALL = ("decoder_block=simple_mlp", "learning_rate=0.01")
BAD = 5  # the step that goes wrong
KEEP_TRAINING = ("abort_on_nan_loss=false", "abort_on_inf_loss=false")


def batch_of(seed):
    tokens = np.random.default_rng(seed).integers(0, 41, (8, 17)).astype(np.int32)
    position, ones = np.tile(np.arange(16, dtype=np.int32), (8, 1)), np.ones((8, 16), np.int32)
    return {
        "inputs": tokens[:, :-1], "inputs_position": position, "inputs_segmentation": ones,
        "targets": tokens[:, 1:], "targets_position": position, "targets_segmentation": ones,
    }  # fmt: skip


def poisoned():
    """A batch with one token outside the vocabulary: its embedding is NaN."""
    batch = batch_of(BAD)
    batch["inputs"] = batch["inputs"].copy()
    batch["inputs"][3, 7] = 1000
    return batch


GOOD = [batch_of(seed) for seed in range(12)]
POISONED = poisoned()
TAINTED = [*GOOD[:BAD], POISONED, *GOOD[BAD + 1 :]]


@pytest.fixture(scope="module")
def trained(run_training):
    """As run_training, with equal runs shared."""
    runs = {}

    def get(*overrides, batches, before_step=None):
        which = overrides, tuple(map(id, batches)), before_step
        if which not in runs:
            runs[which] = run_training(*overrides, batches=batches, before_step=before_step)
        return runs[which]

    return get


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def explode(step, state):
    """At step BAD a head so large that the squared logsumexp of the z-loss overflows, while the
    loss is not NaN."""
    if step != BAD:
        return None
    head = {"weight": state.weights["head"]["weight"] * 1e25}
    return replace(state, weights=state.weights | {"head": head})


def test_nan_loss_ends_the_run_and_names_the_step(trained):
    run = trained(*SMALL, batches=TAINTED)
    assert isinstance(run.error, TrainingFailed)
    assert run.error.exit_code == 1
    assert f"the loss of step {BAD} is nan" in str(run.error)
    assert [record["step"] for record in run.records] == list(range(BAD + 1)), (
        "the bad step is recorded, none after"
    )
    assert math.isnan(run.records[-1]["loss"])
    assert all(math.isfinite(record["loss"]) for record in run.records[:-1])
    assert run.summary["stopped"] == str(run.error)
    assert run.summary["final"]["step"] == BAD
    assert run.summary["final"]["not_finite"]["loss"] == "NaN"


@pytest.mark.parametrize(
    "once", [pytest.param(False, id="for good"), pytest.param(True, id="for one batch")]
)
def test_nan_loss_leaves_the_weights_of_the_last_finite_step(trained, once):
    """As those of a run whose data ended before the bad batch; steps dispatched after it must not
    move them.
    """
    good = trained(*SMALL, batches=GOOD[:BAD])
    assert good.error is None
    assert good.summary["stopped"] == "the data ended"
    run = trained(*SMALL, batches=TAINTED if once else [*GOOD[:BAD], *[POISONED] * 7])
    assert f"step {BAD} " in str(run.error)
    assert_same(run.weights(), good.weights())
    assert_same(run.history[BAD], run.history[BAD - 1])


def test_infinite_loss_ends_the_run(trained):
    run = trained(*SMALL, "z_loss_multiplier=0.1", batches=GOOD, before_step=explode)
    assert f"the loss of step {BAD} is inf" in str(run.error)
    assert run.records[-1]["step"] == BAD
    assert run.records[-1]["loss"] == math.inf
    before = run.history[BAD - 1]
    spoiled = before | {"head": {"weight": before["head"]["weight"] * np.float32(1e25)}}
    assert_same(run.history[BAD], spoiled)


def test_nonfinite_gradient_norm_ends_the_run(trained):
    """A finite loss whose gradient norm overflows would make the weights non-finite, too."""

    def steepen(step, state):
        if step != BAD:
            return None
        head = {"weight": state.weights["head"]["weight"] * 1e21}
        return replace(state, weights=state.weights | {"head": head})

    run = trained(*SMALL, batches=GOOD, before_step=steepen)
    assert f"the gradient norm of step {BAD} is inf" in str(run.error)
    assert math.isfinite(run.records[-1]["loss"])


def test_abort_keys_off_let_the_run_continue(trained):
    run = trained(*SMALL, *KEEP_TRAINING, batches=TAINTED)
    assert run.error is None
    assert [record["step"] for record in run.records] == list(range(12))
    assert math.isnan(run.records[BAD]["loss"])
    assert run.summary["steps"] == 12


@pytest.mark.parametrize(
    ("overrides", "what", "ends"),
    [
        ("abort_on_nan_loss=false", "nan", False),
        ("abort_on_inf_loss=false", "nan", True),
        ("abort_on_nan_loss=false", "inf", True),
        ("abort_on_inf_loss=false", "inf", False),
    ],
)
def test_nan_and_inf_have_separate_keys(trained, overrides, what, ends):
    if what == "nan":
        run = trained(*SMALL, overrides, batches=TAINTED)
    else:
        run = trained(*SMALL, "z_loss_multiplier=0.1", overrides, batches=GOOD, before_step=explode)
    assert (run.error is not None) == ends
    assert str(run.records[BAD]["loss"]) == what
    assert run.records[-1]["step"] == (BAD if ends else 11)


def test_a_continued_run_counts_the_nonfinite_step(trained):
    """Otherwise the schedule and the dropout key would lag one step behind the loop from then
    on.
    """
    run = trained(*SMALL, "abort_on_nan_loss=false", batches=TAINTED)
    assert run.error is None
    assert int(run.loop.state.step) == run.loop.step == 12


def spikes_of(records, interval, factor):
    """The steps to skip by the specification, from the recorded losses and norms."""
    skipped = []
    for index, record in enumerate(records):
        window = records[max(0, index - interval) : index]
        spike = False
        for name in ("loss", "raw_grad_norm"):
            values = [earlier[name] for earlier in window]
            if len(values) >= max(2, interval / 2):
                spike |= record[name] > np.mean(values) + factor * np.std(values, ddof=1)
        skipped.append(float(spike))
    return skipped


# The same batch until its loss is low, one that has nothing to do with it, and the same again.
SPIKE = 25
SPIKED = [GOOD[0]] * SPIKE + [GOOD[1]] + [GOOD[0]] * 4
SKIPPING = ("skip_step_on_spikes=true", "skip_step_interval=8", "skip_step_scaling_factor=4")


@pytest.fixture(scope="module")
def spiked(trained):
    overrides = (
        "opt_type=sgd",
        "learning_rate=0.5",
        "lr_schedule_type=cosine",
        "wsd_decay_steps_fraction=0.1",
    )
    return trained("decoder_block=simple_mlp", *overrides, *SKIPPING, "steps=30", batches=SPIKED)


def test_a_spike_is_skipped_and_recorded(spiked):
    assert spiked.error is None
    records = spiked.records
    assert [record["skipped"] for record in records] == spikes_of(records, 8, 4)
    assert [record["step"] for record in records if record["skipped"]] == [SPIKE]
    assert records[SPIKE]["loss"] > records[SPIKE - 1]["loss"] + 0.3
    for step in range(1, 30):
        changes = [
            not np.array_equal(old, new)
            for old, new in zip(
                jax.tree.leaves(spiked.history[step - 1]),
                jax.tree.leaves(spiked.history[step]),
                strict=True,
            )
        ]
        assert any(changes) == (step != SPIKE), step
    assert records[SPIKE]["param_norm"] == records[SPIKE - 1]["param_norm"]


def test_the_recorded_rate_is_the_one_that_was_applied(spiked):
    """Under SGD the weights move by rate * gradient norm. A skipped step does not advance the
    optimizer's schedule.
    """
    for step in (SPIKE - 1, SPIKE + 1, SPIKE + 3):
        old, new = jax.tree.leaves(spiked.history[step - 1]), jax.tree.leaves(spiked.history[step])
        moved = np.sqrt(
            sum(np.sum((a - b.astype(np.float64)) ** 2) for a, b in zip(new, old, strict=True))
        )
        record = spiked.records[step]
        assert record["learning_rate"] == pytest.approx(moved / record["grad_norm"], rel=1e-3), step


# Skipping comes before aborting.

SKIPPING_SMALL = (*SMALL, "skip_step_on_spikes=true", "skip_step_scaling_factor=1000")


def test_a_nonfinite_step_is_skipped_and_the_run_continues(trained):
    run = trained(*SKIPPING_SMALL, batches=TAINTED)
    assert run.error is None
    assert [record["skipped"] for record in run.records] == [
        float(step == BAD) for step in range(12)
    ]
    assert_same(run.history[BAD], run.history[BAD - 1])
    assert all(math.isfinite(record["loss"]) for record in run.records if record["step"] != BAD)
    assert int(run.loop.state.step) == run.loop.step == 12


@pytest.mark.parametrize("bad", [9, 10])
def test_ten_consecutive_nonfinite_steps_end_the_run(trained, bad):
    """With the weights before them, although finite steps were dispatched after the tenth."""
    run = trained(*SKIPPING_SMALL, batches=[*GOOD[:2], *[POISONED] * bad, *GOOD[2:5]])
    if bad < 10:
        assert run.error is None
        assert run.loop.step == 2 + bad + 3
        return
    assert isinstance(run.error, TrainingFailed)
    assert (
        "the loss of step 11 is nan: training stops after 10 steps in a row that were not finite"
        in str(run.error)
    )
    assert run.records[-1]["step"] == 11
    assert_same(run.weights(), run.history[1])
    assert int(run.loop.state.step) == 11, "the tenth is not counted: a resumed run tries it again"


def test_without_abort_nonfinite_steps_are_skipped_without_limit(trained):
    run = trained(*SKIPPING_SMALL, *KEEP_TRAINING, batches=[GOOD[0], *[POISONED] * 12, GOOD[1]])
    assert run.error is None
    assert_same(run.history[12], run.history[0])
    assert math.isfinite(run.records[-1]["loss"])


def test_no_skipped_metric_without_skip_step_on_spikes(trained):
    assert "skipped" not in trained(*SMALL, batches=GOOD[:BAD]).records[0]


@pytest.mark.slow
def test_a_trace_is_ended_when_the_run_fails(trained):
    run = trained(*SMALL, "profiler=xplane", "profiler_steps=30", batches=TAINTED)
    profiler = next(hook.profiler for hook in run.loop.hooks if isinstance(hook, Profile))
    active = profiler.active
    profiler.close()  # so that this test leaves no trace behind either
    assert run.error is not None
    assert not active
