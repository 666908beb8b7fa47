"""Where runs start and which checkpoints they leave: precedence, errors, damage, tiers, non-finite
losses, signals.

The oracle is the uninterrupted run, or arrays read back by other code.
"""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.checkpoint.open import open_checkpoint
from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.steps import all_steps
from maxtext.common.errors import ConfigError, UserError
from maxtext.trainers import banner, train
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing import restore
from maxtext.trainers.hooks import TrainingFailed
from maxtext.trainers.loop import Hook

TWO = (
    "decoder_block=simple_mlp",  # two matmuls a layer: what is saved and restored counts here
    "enable_checkpointing=true",
    "base_num_decoder_layers=2",
    "per_device_batch_size=2",
    "log_config=false",
    "learning_rate=0.01",
)
RATE = ("lr_schedule_type=wsd", "wsd_decay_steps_fraction=0", "warmup_steps_fraction=0")
SCHEDULE = "learning_rate_schedule_steps=1000000"  # the rate of a step does not depend on `steps`


@pytest.fixture
def go(configure, light_compiler, tmp_path, monkeypatch):
    """Train under a name in one folder; the same name resumes the same run. No loss.png is drawn,
    which takes a third of the time of a short run.
    """
    monkeypatch.setattr(banner, "save_loss_png", lambda *_, **__: None)

    def run(name, *overrides, hooks=()):
        given = {override.partition("=")[0] for override in overrides}
        rest = [
            override
            for override in (*TWO, *RATE, SCHEDULE)
            if override.partition("=")[0] not in given
        ]
        paths = (
            f"base_output_directory={tmp_path}",
            f"run_name={name}",
            f"metrics_file={tmp_path}/{name}.jsonl",
        )
        return train.train(configure(*rest, *overrides, *paths), hooks=hooks)

    run.folder = tmp_path
    run.checkpoints = lambda name: tmp_path / name / "checkpoints"
    run.losses = lambda name: {
        record["step"]: record["loss"]
        for record in map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
    }
    return run


def arrays(step: Path):
    stored = SavedStep(step)
    wanted = {
        name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        for name, tensor in stored.tensors.items()
    }
    return {"/".join(name): array for name, array in stored.restore(wanted).items()}


def assert_equal(actual, expected, exact=True):
    actual, expected = arrays(actual), arrays(expected)
    assert actual.keys() == expected.keys()
    for name in actual:
        if exact:
            assert actual[name].tobytes() == expected[name].tobytes(), name
        else:
            np.testing.assert_allclose(
                actual[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name
            )


def listing(folder):
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.rglob("*"))
    }


def damage(step):
    """Flip one bit of the arrays."""
    file = max(
        (path for path in (step / "state").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(go):
    go("uninterrupted", "steps=9")
    go("parts", "steps=4", "checkpoint_period=2")
    assert all_steps(go.checkpoints("parts")) == [2, 4]
    go("parts", "steps=9", "checkpoint_period=100")
    assert_equal(go.checkpoints("parts") / "9", go.checkpoints("uninterrupted") / "9")
    assert go.losses("parts") == go.losses("uninterrupted")
    before = listing(go.folder / "parts")
    again = go("parts", "steps=9")
    assert again.summary["steps"] == 9
    assert listing(go.folder / "parts") == before, "a finished run is left alone"


@pytest.mark.slow
def test_the_next_save_replaces_an_interim_checkpoint(go):
    """A kill after the second of five steps loses one of them; at the end only saves by steps and
    the last one are there."""
    saved = []

    class Look(Hook):
        def before_step(self, loop):
            saved.append(all_steps(go.checkpoints("run")))

    go(
        "run", "steps=5", "checkpoint_period=2", "checkpoint_period_minutes=1e-9",
        "async_checkpointing=false", hooks=[Look()],
    )  # fmt: skip
    assert saved == [[], [1], [2], [2, 3], [2, 4]]
    assert all_steps(go.checkpoints("run")) == [2, 4, 5]


@pytest.mark.slow
def test_summary_and_plots_of_a_resumed_run_are_those_of_an_uninterrupted_one(go, monkeypatch):
    plots = {}

    def save(path, steps, losses, eval_points, **_):
        plots[Path(path).parent.name] = (list(steps), list(losses), list(eval_points))

    monkeypatch.setattr(banner, "save_loss_png", save)
    evaluation = ("eval_interval=2", "eval_steps=1")
    whole = go("whole", "steps=7", *evaluation).summary
    go("parts", "steps=3", "checkpoint_period=3", *evaluation)
    # As after a kill during step 5: lines of steps that the checkpoint does not have.
    with open(go.folder / "parts.jsonl", "a") as file:
        file.write('{"step": 3, "loss": 99.0}\n{"step": 4, "loss": 99.0}\n{"step": 5, "lo')
    parts = go("parts", "steps=7", *evaluation).summary
    assert plots["parts"] == plots["whole"]
    assert plots["whole"][0] == list(range(7))
    assert [step for step, _ in plots["whole"][2]] == [1, 3, 5]
    for name in ("first_loss", "eval_loss", "steps"):
        assert parts[name] == whole[name]
    assert parts["final"]["loss"] == whole["final"]["loss"]
    # Without evaluations after the resume, the last one before it counts.
    assert go("parts", "steps=8").summary["eval_loss"] == whole["eval_loss"]
    assert plots["parts"][2] == plots["whole"][2]


@pytest.mark.slow
def test_layers_may_be_unrolled_on_resume(go):
    """Weights and moments, both ways; layer by layer they are unchanged."""
    llama = "decoder_block=llama2"
    go("uninterrupted", "steps=6", "scan_layers=true", llama)
    go("there", "steps=3", "scan_layers=true", "weight_dtype=float32", llama)
    scanned = arrays(go.checkpoints("there") / "3")
    go("there", "steps=5", "scan_layers=false", "save_checkpoint_on_completion=true", llama)
    go("there", "steps=6", "scan_layers=true", llama)
    assert_equal(go.checkpoints("there") / "6", go.checkpoints("uninterrupted") / "6", exact=False)
    for step in (3, 5):
        weights = open_checkpoint(go.checkpoints("there") / str(step)).source
        assert weights.tensors["layers/1/attention/query/weight"].shape == (16, 4, 8)
        if step == 3:
            stacked = scanned["weights/layers/0/blocks/0/attention/query/weight"]
            np.testing.assert_array_equal(
                weights.read("layers/1/attention/query/weight"), stacked[:, 1]
            )
    # Without a step in between the very bits.
    context = build_run_context(
        go("there", "steps=6", "scan_layers=true", llama).context.config.model_copy(
            update={"scan_layers": False}
        )
    )
    state, _ = restore.read_state(context, SavedStep(go.checkpoints("there") / "6"))
    saved = arrays(go.checkpoints("there") / "6")
    for tree, prefix in (
        (state.weights, "weights"),
        (moments(state, "mu"), moment_prefix(saved, "mu")),
    ):
        for layer in (0, 1):
            weight = tree["layers"][0]["blocks"][0][layer]["mlp"]["wo"]["weight"]
            np.testing.assert_array_equal(
                weight, saved[f"{prefix}/layers/0/blocks/0/mlp/wo/weight"][:, layer]
            )


def moments(state, name):
    return getattr(state.opt_state.inner_states["main"].inner_state[0], name)


def moment_prefix(saved, name):
    return next(key.partition("/embedder")[0] for key in saved if f"/{name}/embedder" in key)


@pytest.mark.slow
def test_weights_may_change_dtype_on_resume(go):
    go("run", "steps=2")
    saved = arrays(go.checkpoints("run") / "2")["weights/embedder/embedding"]
    result = go("run", "steps=2", "weight_dtype=bfloat16")
    embedding = np.asarray(result.state.weights["embedder"]["embedding"])
    assert embedding.dtype.name == "bfloat16"
    np.testing.assert_array_equal(embedding, saved.astype(embedding.dtype))


@pytest.mark.slow
def test_precedence_of_restore_sources(go):
    go("first", "steps=3")
    go("other", "steps=2", "init_weights_seed=7")
    # The run's own checkpoint comes first, whatever else is named.
    result = go("first", "steps=3", f"load_full_state_path={go.folder}/other")
    assert int(result.state.step) == 3
    # The full state: step, moments and position in the data.
    go("second", "steps=5", f"load_full_state_path={go.checkpoints('first')}")
    go("first", "steps=5")
    assert_equal(go.checkpoints("second") / "5", go.checkpoints("first") / "5")
    # Weights alone: a new run.
    for path in (go.folder / "first", go.checkpoints("first") / "3"):
        step = all_steps(go.checkpoints("first"))[-1] if path.name == "first" else 3
        name = f"from{step}"
        result = go(
            name,
            "steps=1",
            f"load_parameters_path={path}",
            "learning_rate=0",
            "save_checkpoint_on_completion=false",
        )
        assert int(result.state.step) == 1
        assert not go.checkpoints(name).exists()
        expected = arrays(go.checkpoints("first") / str(step))["weights/head/weight"]
        np.testing.assert_array_equal(result.state.weights["head"]["weight"], expected)


@pytest.mark.slow
def test_invalid_start_is_one_error_and_writes_nothing(go, tmp_path):
    go("run", "steps=1")
    before = listing(go.folder / "run")
    with pytest.raises(
        ConfigError,
        match="is of another model .*has shape .*16.* in the checkpoint and .*24.* here",
    ):
        go("run", "steps=2", "base_emb_dim=24")
    with pytest.raises(ConfigError, match="is of another model .*is not in the checkpoint"):
        go("run", "steps=2", "base_num_decoder_layers=3")
    with pytest.raises(
        ConfigError, match="saved with opt_type=adamw, and this run has opt_type=sgd"
    ):
        go("run", "steps=2", "opt_type=sgd")
    with pytest.raises(ConfigError, match="saved with other settings of the optimizer"):
        go("run", "steps=2", "skip_step_on_spikes=true")
    assert listing(go.folder / "run") == before
    with pytest.raises(UserError, match="holds no checkpoint of training"):
        go("new", "steps=1", f"load_full_state_path={tmp_path}")
    with pytest.raises(UserError, match="there is no folder"):
        go("new", "steps=1", f"load_full_state_path={tmp_path}/nowhere")
    with pytest.raises(
        ConfigError, match="source_checkpoint_layout=safetensors, but .* holds orbax"
    ):
        go(
            "new",
            "steps=1",
            f"load_full_state_path={go.folder}/run",
            "source_checkpoint_layout=safetensors",
        )
    with pytest.raises(ConfigError, match="cannot be imported"):
        go(
            "new",
            "steps=1",
            f"load_parameters_path={go.folder}/run",
            "checkpoint_conversion_fn=no.such.function",
        )
    assert not (go.folder / "new").exists()


def halved(weights):
    return jax.tree.map(lambda weight: weight / 2, weights)


@pytest.mark.slow
def test_checkpoint_conversion_fn_changes_loaded_weights(go, monkeypatch):
    go("run", "steps=1")
    expected = arrays(go.checkpoints("run") / "1")["weights/head/weight"] / 2
    import sys
    import types

    monkeypatch.setitem(
        sys.modules, "my_weights", types.SimpleNamespace(halved=halved, fewer=lambda weights: {})
    )
    overrides = ("steps=1", f"load_parameters_path={go.folder}/run", "learning_rate=0")
    result = go("new", *overrides, "checkpoint_conversion_fn=my_weights.halved")
    np.testing.assert_array_equal(result.state.weights["head"]["weight"], expected)
    with pytest.raises(
        UserError, match="my_weights.fewer returned other weights than the model has"
    ):
        go("other", *overrides, "checkpoint_conversion_fn=my_weights.fewer")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_restored(go, caplog_lines):
    go("uninterrupted", "steps=6")
    go("run", "steps=4", "checkpoint_period=2")
    folder = go.checkpoints("run")
    (folder / "5.orbax-checkpoint-tmp").mkdir()
    damage(folder / "4")
    go("run", "steps=6", "max_num_checkpoints_to_keep=2")
    said = "\n".join(caplog_lines)
    assert f"checkpoint {folder}/4 is damaged: state/" in said
    assert "has changed since it was written" in said
    assert "5.orbax-checkpoint-tmp is no complete checkpoint" in said
    assert go.losses("run") == go.losses("uninterrupted")
    assert_equal(folder / "6", go.checkpoints("uninterrupted") / "6")
    assert all_steps(folder) == [2, 6], "a damaged one does not count among those that are kept"
    assert (folder / "4.damaged").is_dir()
    assert not (folder / "5.orbax-checkpoint-tmp").exists()
    for step in all_steps(folder):
        damage(folder / str(step))
    before = listing(folder)
    with pytest.raises(
        UserError, match="has no checkpoint that can be read: steps 2, 6 are damaged"
    ):
        go("run", "steps=8")
    assert listing(folder) == before


@pytest.fixture
def caplog_lines():
    import logging

    from maxtext.common.log import LOGGER

    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler, level = Lines(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield lines
    LOGGER.setLevel(level)
    LOGGER.removeHandler(handler)


@pytest.mark.slow
def test_a_damaged_step_without_digest_is_skipped(go, caplog_lines):
    go("run", "steps=4", "checkpoint_period=2")
    folder = go.checkpoints("run")
    (folder / "4" / "digest.process_0.json").unlink()
    result = go("run", "steps=4")
    assert int(result.state.step) == 4, "no digest, no verdict"
    for path in (folder / "4" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    go("run", "steps=5", "checkpoint_period=4")
    assert any("4 is damaged" in line and "cannot be read" in line for line in caplog_lines)
    assert (folder / "4.damaged").is_dir()
    assert all_steps(folder) == [2, 4, 5]


class Stop(Hook):
    def __init__(self, step):
        self.step = step

    def after_step(self, loop):
        if loop.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def stop_at(monkeypatch):
    """SIGTERM after a step."""
    loop = train.Loop

    def at(step):
        monkeypatch.setattr(
            train,
            "Loop",
            lambda *args, hooks, **options: loop(*args, hooks=[*hooks, Stop(step)], **options),
        )

    return at


@pytest.mark.slow
def test_a_signal_saves_a_checkpoint_by_default(go, stop_at):
    stop_at(3)
    never = "save_checkpoint_on_completion=false"
    for name, overrides, saved in (
        ("default", (), [3]), ("never", (never,), []),
        ("signals", (never, "enable_autocheckpoint=true"), [3])
    ):  # fmt: skip
        result = go(name, "steps=9", *overrides)
        assert result.summary["stopped"] == "SIGTERM"
        assert result.signal == signal.SIGTERM
        assert all_steps(go.checkpoints(name)) == saved
    assert go("last", "steps=3").signal is None, "no step was left"


def test_the_state_before_the_first_step_can_be_saved(go):
    start = ("save_checkpoint_on_start=true", "checkpoint_period=100")
    go("started", "steps=2", *start, "save_checkpoint_on_completion=false")
    assert all_steps(go.checkpoints("started")) == [0]
    go("started", "steps=2", *start)
    assert all_steps(go.checkpoints("started")) == [0, 2], "resumed at 0, which is not saved again"
    go("plain", "steps=2", "checkpoint_period=100")
    assert all_steps(go.checkpoints("plain")) == [2]
    assert_equal(go.checkpoints("started") / "2", go.checkpoints("plain") / "2")
    assert go.losses("started") == go.losses("plain")


@pytest.mark.slow
def test_continuous_checkpointing(go):
    """A save starts as soon as the previous one is complete, so as many steps lie between them as
    it took."""
    overrides = ("enable_continuous_checkpointing=true", "max_num_checkpoints_to_keep=3")
    go("blocking", "steps=6", "async_checkpointing=false", *overrides)
    assert all_steps(go.checkpoints("blocking")) == [4, 5, 6]
    go("run", "steps=40", *overrides)
    saved_steps = all_steps(go.checkpoints("run"))
    assert 2 <= len(saved_steps) <= 3
    assert saved_steps[-1] == 40
    go("calm", "steps=40")
    assert_equal(go.checkpoints("run") / "40", go.checkpoints("calm") / "40")


@pytest.mark.slow
def test_old_checkpoints_can_be_moved_to_a_trash_folder(go):
    go(
        "run",
        "steps=3",
        "checkpoint_period=1",
        "max_num_checkpoints_to_keep=1",
        "checkpoint_todelete_subdir=old",
    )
    folder = go.checkpoints("run")
    assert all_steps(folder) == [3]
    assert all_steps(folder / "old") == [1, 2]
    attic = go.folder / "attic"
    overrides = (
        "steps=4",
        "max_num_checkpoints_to_keep=1",
        f"checkpoint_todelete_full_path={attic}",
    )
    go("run", *overrides, "async_checkpointing=false")
    assert all_steps(attic / "run") == [3]


@pytest.mark.slow
def test_nan_loss_saves_the_last_finite_step(go):
    """The state before the bad batch is saved, with the data position before it, so that nothing is
    skipped."""
    bad = "learning_rate=1e30"
    with pytest.raises(TrainingFailed):
        go("run", "steps=9", bad)
    saved = all_steps(go.checkpoints("run"))
    assert len(saved) == 1
    (good,) = saved
    stored = SavedStep(go.checkpoints("run") / str(good))
    assert stored.iterator_states()[0]["step"] == good
    assert all(
        np.isfinite(array).all()
        for array in arrays(stored.path).values()
        if array.dtype.kind == "f"
    )
    with pytest.raises(TrainingFailed, match=f"of step {good} "):
        go("run", "steps=9", bad)


@pytest.mark.slow
def test_the_newest_tier_is_restored(go, stop_at, caplog_lines, tmp_path):
    local = tmp_path / "local"
    overrides = (
        "enable_emergency_checkpoint=true",
        f"local_checkpoint_directory={local}",
        "local_checkpoint_period=2",
    )
    go("uninterrupted", "steps=11")
    stop_at(7)
    go("run", "steps=11", "checkpoint_period=5", "save_checkpoint_on_completion=false", *overrides)
    assert all_steps(go.checkpoints("run")) == [5]
    parts = local / "run" / "process_0"
    assert sorted(path.name for path in parts.iterdir()) == ["4", "6"], "the newest two"
    stop_at(100)
    # The machine's own disk has a newer step; damaged, it does not count, and neither does that of
    # another mesh or run.
    result = go("run", "steps=6", "checkpoint_period=5", *overrides)
    assert int(result.state.step) == 6
    file = next((parts / "6").glob("*.safetensors"))
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert int(go("run", "steps=5", "checkpoint_period=5", *overrides).state.step) == 5
    file.write_bytes(good)
    assert (
        int(
            go(
                "run", "steps=5", "checkpoint_period=5", "weight_dtype=bfloat16", *overrides
            ).state.step
        )
        == 5
    )
    assert any("the local checkpoint of step 6 is not used" in line for line in caplog_lines)
    go("run", "steps=11", "checkpoint_period=5", *overrides)
    assert go.losses("run") == go.losses("uninterrupted")
    assert_equal(go.checkpoints("run") / "11", go.checkpoints("uninterrupted") / "11")


def test_checkpoint_keys_without_effect_are_rejected(configure):
    for overrides, match in (
        (["checkpoint_conversion_fn=a.b"], "needs load_parameters_path"),
        (["source_checkpoint_layout=safetensors"], "needs a checkpoint to read"),
        (["checkpoint_todelete_subdir=old"], "needs max_num_checkpoints_to_keep"),
        (["local_checkpoint_period=5"], "enable_emergency_checkpoint=true"),
        (["enable_orbax_v1=true"], "does not act"),
        (["enable_single_replica_ckpt_restoring=true"], "does not act"),
        (
            [
                "enable_emergency_checkpoint=true",
                "local_checkpoint_directory=x",
                "local_checkpoint_period=10000",
            ],
            "must be smaller than checkpoint_period",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            configure("enable_checkpointing=true", *overrides)
