"""Two processes save together: if one cannot write, the save fails on both, and the next one
succeeds.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.steps import files_without_digest, verify

SCRIPT = Path(__file__).parent / "two_processes.py"


@pytest.mark.slow
def test_failed_write_of_one_process_fails_the_save_on_all(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder = tmp_path / "checkpoints"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), address, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    said = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        said.append(json.loads(out.splitlines()[-1]))
    for one in said:
        first, second, third = one["failures"]
        assert first is third is None
        assert second == "No space left on device"
        assert one["seconds"] < 60, "nobody waits for a barrier to time out"
        assert one["steps"] == [1, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["1", "3"], "what was begun is removed"
    assert SavedStep(folder / "3").iterator_states() == [{"process": 0}, {"process": 1}]
    assert not verify(folder / "3")
    assert not files_without_digest(folder / "3")
