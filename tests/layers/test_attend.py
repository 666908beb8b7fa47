"""The flash kernel on the shards of a mesh, by its interpreter, against the plain definition of
attention.
"""

import json

import pytest

from tests.compiling import cpu_devices
from tests.forked import run_python

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
    cases = json.dumps(list(CASES.values()))
    done = run_python("-m", "tests.layers.run_flash", cases, environment=cpu_devices(8))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_flash_on_shards(errors, case):
    """Output and the gradients of queries, keys and values."""
    assert max(errors[case]) < 1e-5
