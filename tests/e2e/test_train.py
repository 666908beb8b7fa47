"""Complete runs of `maxtext train`: convergence, reproducibility, and the files that they write."""

import json
import math
import struct

import pytest

from maxtext.cli.main import main
from maxtext.configs.types import MaxTextConfig
from maxtext.trainers.checkpointing import init_state, restore

SENTENCE = "a quick brown fox jumps over one lazy dog; "  # no word comes twice
FIELDS = {
    "step", "loss", "lm_loss", "learning_rate", "grad_norm", "raw_grad_norm", "param_norm",
    "total_weights", "step_time_seconds", "tokens_per_second_per_device",
    "tflops_per_second_per_device", "mfu",
}  # fmt: skip
ONE = ("base_num_decoder_layers=1", "scan_layers=false", "remat_policy=none")
SIMPLE = ("decoder_block=simple", *ONE)


@pytest.fixture(scope="module")
def fox(train, tmp_path_factory):
    """A model trained on one repeated sentence, with every writer on."""
    base = tmp_path_factory.mktemp("fox")
    (base / "fox.txt").write_text(SENTENCE * 400)
    overrides = (
        "dataset_type=grain", "grain_file_type=text", f"grain_train_files={base}/fox.txt",
        "tokenizer_path=byte", "grain_num_threads=2", "use_truncation=false",
        "grain_worker_count=0", "num_epoch=8", "steps=120", "enable_tensorboard=true",
        f"tensorboard_dir={base}/it/tensorboard", "log_period=10", "prompt=a quick",
    )  # fmt: skip
    result = train(*overrides, base=base)
    assert result.code == 0, result.err
    return result


@pytest.mark.slow
def test_overfits_one_batch(train):
    result = train(*ONE, "reuse_example_batch=1", "steps=150")
    assert result.code == 0, result.err
    assert len(result.losses) == 150
    assert abs(result.losses[0] - math.log(259)) < 1.0, "the initial model is uniform"
    assert result.losses[-1] < 0.05


@pytest.mark.slow
def test_learns_text(fox):
    """To the entropy of the sentence: nothing is uncertain in it but where a row begins."""
    assert abs(fox.losses[0] - math.log(259)) < 1.0
    assert fox.losses[-1] < 0.3


def test_completes_the_prompt(fox):
    text = fox.out.partition("what the model writes after 'a quick':")[2]
    assert text.strip().startswith("a quick brown fox jumps over one lazy dog;")


def test_every_step_has_a_complete_record(fox):
    assert [record["step"] for record in fox.records] == list(range(120))
    for record in fox.records:
        assert record.keys() >= FIELDS
        assert all(
            record[name] is not None for name in FIELDS - {"mfu"}
        )  # the peak of a CPU is not known
        assert record["loss"] == record["lm_loss"]
        assert record["total_weights"] <= 4 * 32
    # The speed is that of the newest steps that together took a second, but never more than 50, nor
    # the first.
    for number in (0, 1, 40, 119):
        speeds = [
            (record["total_weights"], record["step_time_seconds"])
            for record in fox.records[: number + 1]
        ]
        speeds = speeds[1:][-50:] or speeds
        while len(speeds) > 1 and sum(seconds for _, seconds in speeds[1:]) >= 1.0:
            speeds = speeds[1:]
        speed = sum(tokens for tokens, _ in speeds) / sum(seconds for _, seconds in speeds)
        assert fox.records[number]["tokens_per_second_per_device"] == pytest.approx(speed, rel=1e-6)
    # Of a token, by hand: two layers of attention (heads of 8: 4 queries, 2 keys and values, 4 out;
    # a token sees 16.5 others on average) and three MLP products of 64, and logits; 2 a
    # multiply-add, three times a forward pass.
    layer = 2 * 32 * 8 * (4 + 2 + 2 + 4) + 4 * 4 * 8 * 16.5 + 3 * 2 * 32 * 64
    flops = 3 * (2 * layer + 2 * 32 * 259)
    record = fox.records[7]
    expected = record["tokens_per_second_per_device"] * flops / 1e12
    assert record["tflops_per_second_per_device"] == pytest.approx(expected, rel=1e-9)


def test_console_output(fox):
    lines = fox.out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 120
    assert steps[0].startswith("step 0/120  loss 5.")
    weights = 2 * (32 * 8 * 12 + 3 * 32 * 64 + 2 * 32) + 32 + 2 * 32 * 259
    assert any(line.split() == ["parameters", f"{weights:,}"] for line in lines)
    assert any(line.split()[:4] == ["tokens", "a", "step", "128"] for line in lines)


def test_summary_file(fox):
    summary = fox.summary
    assert (summary["run_name"], summary["steps"], summary["stopped"]) == (
        "it",
        120,
        "all steps done",
    )
    assert summary["first_loss"] == fox.losses[0]
    assert summary["final"]["loss"] == fox.losses[-1]
    assert summary["final"]["step"] == 119
    assert summary["parameters"] == 2 * (32 * 8 * 12 + 3 * 32 * 64 + 2 * 32) + 32 + 2 * 32 * 259
    assert summary["seconds"] > 0


def test_loss_plot(fox):
    data = (fox.folder / "loss.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert min(width, height) >= 100


def test_tensorboard_has_the_same_losses(fox):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(fox.folder / "tensorboard"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.rpartition("/")[2] == "loss"]
    assert len(tags) == 1
    scalars = events.Scalars(tags[0])
    assert [scalar.step for scalar in scalars] == list(range(120))
    assert [scalar.value for scalar in scalars] == fox.losses, "losses are float32 in both"


def test_the_configuration_can_be_read_back(fox, capsys):
    path = fox.folder / "config.yml"
    assert main(["config", str(path), "--format", "json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values) == set(MaxTextConfig.model_fields)
    given = {
        "base_emb_dim": 32,
        "vocab_size": 259,
        "learning_rate": 0.01,
        "prompt": "a quick",
        "dtype": "float32",
    }
    assert given.items() <= values.items()
    assert main(["config", str(path), "--changed"]) == 0
    assert "base_emb_dim: 32" in capsys.readouterr().out


@pytest.fixture(scope="module")
def repeated(train, tmp_path_factory):
    """(losses of a run, the run that its config.yml gives)"""
    base = tmp_path_factory.mktemp("repeated")
    first = train(*ONE, "steps=4", base=base)
    losses = first.losses
    return losses, train(file=first.folder / "config.yml", base=base)


@pytest.mark.slow
def test_a_run_can_be_repeated_from_its_configuration(repeated):
    losses, again = repeated
    assert again.code == 0
    assert again.losses == losses
    assert again.metrics.with_name("metrics.jsonl.1").exists(), (
        "the earlier records are moved to another name"
    )


def test_a_repeated_run_does_not_sample_text(repeated):
    assert "what the model writes" not in repeated[1].out


@pytest.fixture(scope="module")
def six(train):
    """The losses of six steps of the default seeds."""
    return train(*ONE, "steps=6").losses


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_to_the_bit(train, six):
    assert len(six) == 6
    assert train(*ONE, "steps=6").losses == six
    for override in ("init_weights_seed=1", "data_shuffle_seed=1"):
        losses = train(*ONE, "steps=6", override).losses
        assert all(actual != expected for actual, expected in zip(losses, six, strict=True)), (
            override
        )


@pytest.mark.slow
def test_dropout_changes_losses_and_repeats(train, six):
    first, second = (train(*ONE, "steps=6", "dropout_rate=0.5").losses for _ in range(2))
    assert first == second
    assert all(actual != expected for actual, expected in zip(first, six, strict=True))
    assert train(*ONE, "steps=6", "dropout_rate=0.5", "enable_dropout=false").losses == six


@pytest.mark.slow
def test_batch_size_ramp_up(train):
    """Sizes 1, 2, 3, each for 4 samples, then 4."""
    overrides = (
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=1",
        "per_device_batch_size_increment=1",
    )
    result = train(*SIMPLE, *overrides, "global_rampup_samples=12", "steps=10")
    assert result.code == 0, result.err
    rows = [record["total_weights"] / 32 for record in result.records]
    assert rows == [1] * 4 + [2] * 2 + [3] * 2 + [4] * 2


def test_nonfinite_loss_is_one_error(train):
    """A rate at which float32 overflows in the first update."""
    result = train(*SIMPLE, "steps=20", "learning_rate=1e38")
    assert result.code == 1
    errors = [line for line in result.err.splitlines() if line.startswith("maxtext: error: ")]
    last = result.records[-1]
    assert not math.isfinite(last["loss"])
    assert len(errors) == 1
    assert f"the loss of step {last['step']} is {last['loss']}" in errors[0]
    assert result.summary["stopped"] in errors[0]
    assert all(math.isfinite(record["loss"]) for record in result.records[:-1])
    assert "Traceback" not in result.err
    assert (result.folder / "loss.png").exists()


def test_the_data_may_end_before_the_steps(train, tmp_path):
    (tmp_path / "text").write_text("some words to read " * 60)
    overrides = (
        "dataset_type=grain",
        "grain_file_type=text",
        f"grain_train_files={tmp_path}/text",
        "tokenizer_path=byte",
    )
    result = train(*overrides, "use_truncation=false", "grain_worker_count=0", *SIMPLE, "steps=100")
    assert result.code == 0
    assert result.summary["stopped"] == "the data ended"
    assert result.summary["steps"] == len(result.losses) == math.ceil((60 * 19 + 1) / 32) // 4


def test_an_early_end_is_reported(train):
    """A run of a hundred steps that stops after two because it reached its goal."""
    result = train(*SIMPLE, "steps=100", "eval_interval=2", "eval_steps=1", "target_eval_loss=100")
    assert result.summary["steps"] == 2
    assert result.summary["stopped"].startswith("eval_loss")
    assert result.summary["stopped"] in result.out + result.err


def test_an_invalid_prompt_is_rejected_before_training(train):
    result = train(*SIMPLE, "steps=2", "vocab_size=200", "prompt=hello")
    assert result.code == 2
    assert "set vocab_size to 259 or more" in result.err
    assert not result.metrics.exists()


def test_an_unwritable_metrics_file_is_rejected_and_leaves_no_files(train, tmp_path):
    (tmp_path / "file").write_text("")
    result = train(
        *SIMPLE, "steps=2", f"metrics_file={tmp_path}/file/metrics", base=tmp_path / "out"
    )
    assert result.code == 2
    assert "cannot be written" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_initial_checkpoint_is_opened_once(train, monkeypatch):
    """By the command line, which needs its settings; the trainer reads weights from the same."""
    first = train(*SIMPLE, "steps=1", "enable_checkpointing=true")
    for module in (init_state, restore):
        monkeypatch.setattr(module, "open_checkpoint", lambda path: pytest.fail("opened again"))
    result = train(*SIMPLE, "steps=1", f"load_parameters_path={first.folder}/checkpoints")
    assert result.code == 0, result.err
