"""The engine gives the same tokens on one device and sharded over eight."""

import json

import pytest

from tests.compiling import cpu_devices
from tests.forked import run_python
from tests.inference import eight_engines

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.slow
def test_eight_devices_give_the_tokens_of_one():
    done = run_python("-m", "tests.inference.eight_engines", environment=cpu_devices(8))
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])
    single_device = {
        kind: eight_engines.tokens(kind, [], 1)
        for kind in {kind for kind, _, _ in eight_engines.CASES}
    }
    assert dict(zip(eight_engines.CASES_BY_NAME, outputs, strict=True)) == {
        name: single_device[case[0]] for name, case in eight_engines.CASES_BY_NAME.items()
    }
