"""A run of reinforcement learning that is killed resumes to the same curve."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compiling import cpu_devices
from tests.support.distillation import save_llama
from tests.support.grpo import BYTES

SCRIPT = """
import sys
from maxtext.trainers import tune
from tests.support.grpo import ROWS, RUN, share_of_low_bytes

tune.grpo(
    sys.argv[1], ROWS, rewards=[share_of_low_bytes],
    **RUN | dict(
        base_output_directory=sys.argv[2], run_name="run", steps=8, num_epoch=4,
        checkpoint_period=2, learning_rate=0.01, grpo_beta=0.02,
        use_agentic_rollout=sys.argv[3] == "agentic", metrics_file=sys.argv[2] + "/metrics.jsonl",
    ),
)
"""
NAMES = ("loss", "reward", "kl", "grad_norm", "completions/mean_length")


def start(*args):
    root = Path(__file__).parents[2]
    environ = os.environ | cpu_devices(1)
    environ["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *map(str, args)], env=environ)


def curve(folder):
    """The last record of each step: a step after the last checkpoint is done twice."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {each["step"]: [each[name] for name in NAMES] for each in records if "loss" in each}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["plain", "agentic"])
def test_killed_run_resumes_to_the_same_curve(tmp_path, kind):
    base = tmp_path / "base"
    save_llama(base, layers=1, embed_dim=16, seed=0, vocab_size=BYTES)
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    assert start(base, folders[0], kind).wait() == 0
    for num_steps in (3, 6):  # the steps that are done when the process is killed
        process = start(base, folders[1], kind)
        path = folders[1] / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (path.is_file() and len(path.read_text().splitlines()) >= num_steps):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(base, folders[1], kind).wait() == 0
    assert curve(folders[1]) == curve(folders[0])
    logs = [(folder / "run/rollouts.jsonl").read_text() for folder in folders]
    assert logs[0] == logs[1]
