"""`maxtext compile`, and training with what it wrote."""

import os
import subprocess
import sys

import pytest

from maxtext.cli.main import main
from tests.compiling import cpu_devices

TINY = [
    "base_emb_dim=32", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8",
    "base_mlp_dim=64", "base_num_decoder_layers=1", "vocab_size=128", "max_target_length=32",
    "per_device_batch_size=2", "steps=2", "dataset_type=synthetic", "attention=dot_product",
    "enable_tensorboard=false", "run_name=it", "decoder_block=simple", "scan_layers=false",
    "remat_policy=none",
]  # fmt: skip


def test_it_needs_a_file(capsys):
    assert main(["compile", *TINY]) == 2
    assert "set compiled_trainstep_file=FILE" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["compile", *TINY, f"compiled_trainstep_file={tmp_path}/file/step.bin"]) == 1
    assert "cannot write compiled_trainstep_file=" in capsys.readouterr().err


def test_no_slices(capsys):
    assert (
        main(["compile", *TINY, "compile_topology=v5p-8", "compiled_trainstep_file=step.bin"]) == 2
    )
    assert "needs compile_topology_num_slices" in capsys.readouterr().err


def run(*words, devices=2, folder):
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | cpu_devices(devices),
    )


@pytest.mark.slow
def test_a_run_of_the_compiled_step(tmp_path):
    words = [*TINY, "compiled_trainstep_file=step.bin", "jax_cache_dir=none"]
    made = run("maxtext.train_compile", *words, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "compiled for cpu (2 x cpu)" in made.stdout
    before = (tmp_path / "step.bin").read_bytes()
    trained = run("maxtext", "train", *words, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "the train step comes from step.bin and is not compiled" in trained.stderr
    assert "step 1/2" in trained.stdout
    anew = [word.replace("run_name=it", "run_name=other") for word in words]
    other = run("maxtext", "train", *anew, devices=1, folder=tmp_path)
    assert other.returncode == 2
    assert "devices 2 there, 1 here" in other.stderr
    assert (tmp_path / "step.bin").read_bytes() == before
