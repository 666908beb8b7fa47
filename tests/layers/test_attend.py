"""The flash kernel on the shards of a mesh, by its interpreter, against the plain definition of
attention.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import cpu_devices

CASES = {
    "rows and heads": {"mesh": {"fsdp": 2, "tensor": 2}, "heads": 4, "kv_heads": 2},
    "more devices than key heads": {"mesh": {"fsdp": 1, "tensor": 4}, "heads": 4, "kv_heads": 1},
    "queries along the sequence": {"mesh": {"fsdp": 1, "context": 2}, "heads": 2, "kv_heads": 2,
                     "segments": True},
    "balanced": {"mesh": {"fsdp": 1, "context": 2}, "heads": 2, "kv_heads": 1, "balanced": 2,
                 "segments": True},
    "balanced, with a window": {
        "mesh": {"fsdp": 2, "context": 2}, "heads": 1, "kv_heads": 1, "balanced": 2, "window": 60,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def errors():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "run_flash.py")],
        input=json.dumps(list(CASES.values())),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | cpu_devices(8),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_flash_on_shards(errors, case):
    """Output and the gradients of queries, keys and values."""
    assert max(errors[case]) < 1e-5
