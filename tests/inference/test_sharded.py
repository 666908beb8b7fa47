"""Split over eight devices in any way, the engine gives the tokens that it gives on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference import eight_engines

pytestmark = pytest.mark.usefixtures("quick_programs", "few_programs")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_eight_devices_give_the_tokens_of_one():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    words = [sys.executable, "-m", "tests.inference.eight_engines"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    one = {
        kind: eight_engines.tokens(kind, [], 1)
        for kind in {kind for kind, _, _ in eight_engines.CASES}
    }
    assert dict(zip(eight_engines.CASES_BY_NAME, found, strict=True)) == {
        name: one[case[0]] for name, case in eight_engines.CASES_BY_NAME.items()
    }
