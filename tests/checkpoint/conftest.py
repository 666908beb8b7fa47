import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "llama_table.py"


@pytest.fixture(scope="session")
def llama():
    """The module with the small Llama."""
    spec = importlib.util.spec_from_file_location("llama_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_job():
    """Do a job of that module in a process of its own."""

    def run(job, **environ):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(SCRIPT)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | environ,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def hf_folder(llama, tmp_path_factory):
    """A Hugging Face folder in three shards, in bfloat16, and its tensors. Not to be changed."""
    from maxtext.checkpoint.safetensors_writer import write_hf_folder

    folder = tmp_path_factory.mktemp("hf") / "llama"
    _, _, param_infos = llama.model()
    source = llama.Random(llama.their_tensors(param_infos, ml_dtypes.bfloat16))
    total = sum(tensor.nbytes for tensor in source.tensors.values())
    write_hf_folder(folder, source, {"config.json": "{}"}, [], shard_bytes=int(total / 2.5))
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder, {name: np.array(array) for name, array in llama.Random(source.tensors)}
