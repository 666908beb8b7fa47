"""Runs in processes of their own: signals, and more devices than this machine has."""

import json
import signal
import time

import pytest

from maxtext.checkpoint.steps import all_steps
from tests.compiling import cpu_devices

# Two matmuls: steps are so short that a signal arrives among thousands of them.
from tests.forked import run_python

QUICK = (
    "decoder_block=simple",
    "base_num_decoder_layers=1",
    "scan_layers=false",
    "remat_policy=none",
)


def wait_for_steps(process, metrics, count):
    """Wait until `count` steps are recorded."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.05)
    pytest.fail("the run did not come so far in two minutes")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(start, number):
    process, run = start(*QUICK, "steps=1000000", "enable_checkpointing=true")
    wait_for_steps(process, run.metrics, 20)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"{number.name}: stopping after the current step" in err
    assert "Traceback" not in err
    # Every line of the records is complete, and they end where the summary says.
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert run.metrics.read_bytes().endswith(b"\n")
    assert [record["step"] for record in records] == list(range(len(records)))
    assert 20 <= len(records) < 1000000
    summary = run.summary
    assert summary["stopped"] == number.name
    assert summary["steps"] == len(records)
    assert summary["final"] == records[-1]
    assert all_steps(run.folder / "checkpoints") == [len(records)]
    assert (run.folder / "loss.png").exists()
    assert f"step {len(records) - 1}/1000000  loss" in out


LOADERS = """
import json, sys
from maxtext.models.configuration import load
from maxtext.trainers.data_loader import EvalDataLoader, TrainDataLoader, open_eval_streams
from maxtext.trainers.build import build_run_context

config = load(None, sys.argv[1:])
context = build_run_context(config)
train = [batch.fields for batch in TrainDataLoader(context)]
loader = EvalDataLoader(context, open_eval_streams(context), add_fields=lambda batch: batch)
evaluation = list(loader())
count = lambda batches: sum(int((batch["targets_segmentation"] != 0).sum()) for batch in batches)
print(json.dumps({
    "devices": len(train[0]["inputs"].devices()),
    "rows": sorted({len(batch["inputs"]) for batch in train}),
    "tokens": count(train), "eval_rows": sorted({len(batch["inputs"]) for batch in evaluation}),
    "eval_tokens": count(evaluation),
}))
"""
TWO_DEVICES = cpu_devices(2)


@pytest.mark.slow
def test_half_a_sequence_per_device(start):
    process, run = start("per_device_batch_size=0.5", "steps=3", *QUICK, environment=TWO_DEVICES)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [record["total_weights"] for record in run.records] == [32] * 3, "one row of 32 tokens"
    assert "2 x cpu" in out


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """The batches of two devices from eight documents of 28 characters, half a sequence each."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        (folder / f"{number}").write_text(f"document number {number} of eight..")
    overrides = [
        "dataset_type=grain", "grain_file_type=text", f"grain_train_files={folder}",
        f"grain_eval_files={folder}", "tokenizer_path=byte", "vocab_size=259",
        "max_target_length=32", "per_device_batch_size=0.5", "packing=false", "base_emb_dim=32",
        "grain_num_threads=2", "eval_interval=1", *QUICK,
    ]  # fmt: skip
    result = run_python("-c", LOADERS, *overrides, environment=TWO_DEVICES)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_one_row_is_sharded_over_two_devices(batches):
    assert (batches["devices"], batches["rows"], batches["eval_rows"]) == (2, [1], [1])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["tokens", "eval_tokens"])
def test_every_loaded_row_is_used(batches, which):
    """Otherwise an epoch would be half of the data, and so would an evaluation."""
    assert batches[which] == 8 * (
        28 + 1
    )  # a document of n characters between its two ends has n + 1 next tokens
