"""`maxtext compile`, and training with what it wrote."""

import pytest

from maxtext.cli.main import main
from tests.compiling import cpu_devices
from tests.forked import ForkedProcess

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


def run_with_two_devices(folder, *args):
    """(exit code, output, errors) of a process."""
    out, err = folder / f"{args[0]}.out", folder / f"{args[0]}.err"
    process = ForkedProcess([*args], out, err, cpu_devices(2))
    return process.wait(), *process.communicate()


@pytest.mark.slow
def test_a_run_of_the_compiled_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = [*TINY, "compiled_trainstep_file=step.bin", "jax_cache_dir=none"]
    code, out, err = run_with_two_devices(tmp_path, "compile", *args)
    assert code == 0, err
    assert "compiled for cpu (2 x cpu)" in out
    before = (tmp_path / "step.bin").read_bytes()
    code, out, err = run_with_two_devices(tmp_path, "train", *args)
    assert code == 0, err
    assert "the train step comes from step.bin and is not compiled" in err
    assert "step 1/2" in out
    # this process has one device
    assert main(["train", *(arg.replace("run_name=it", "run_name=other") for arg in args)]) == 2
    assert "devices 2 there, 1 here" in capsys.readouterr().err
    assert (tmp_path / "step.bin").read_bytes() == before
