"""`maxtext estimate` as a person meets it."""

import json

import pytest

from maxtext.cli.main import main
from tests.forked import run_python

TINY = [
    "base_emb_dim=32", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8",
    "base_mlp_dim=64", "base_num_decoder_layers=1", "vocab_size=128", "max_target_length=32",
    "per_device_batch_size=2", "dataset_type=synthetic", "attention=dot_product",
]  # fmt: skip
LLAMA = [
    "model_name=llama2-7b",
    "max_target_length=4096",
    "per_device_batch_size=4",
    "attention=dot_product",
]


def test_llama2_7b_by_arithmetic(capsys):
    assert main(["estimate", *LLAMA, "--target", "v5p:4x4x4", "--no-compile"]) == 0
    text = capsys.readouterr().out
    for part in (
        "llama2-7b on v5p:4x4x4 (64 x TPU v5p): fsdp 64; 4 x 4,096 tokens a device",
        "parameters 6,738,415,616, active 6,738,415,616",
        "weights            401.6 MiB",  # 4 x 6,738,415,616 / 64
        "optimizer          803.3 MiB",
        # 32 layers x 4 x 4096 tokens x 4096 numbers of 2 bytes
        "full *                              4.00 GiB",
        "of 95.00 GiB a device",
        "by arithmetic, not compiled",
        "least recomputation at this batch: remat_policy=",
        "largest batch: per_device_batch_size=",
    ):
        assert part in text


@pytest.mark.slow
def test_for_another_program(capsys):
    words = ["estimate", *LLAMA, "compile_topology=v5p-128", "compile_topology_num_slices=2"]
    assert main([*words, "--no-compile", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == {
        "name": "v5p-128",
        "kind": "TPU v5p",
        "devices": 128,
        "slices": 2,
        "memory": 95 * 2**30,
    }
    assert found["weights"] == 4 * 6_738_415_616 // 64  # data parallel between the slices
    assert found["gradients"] == found["weights"]
    assert found["batch"] == 6 * 4 * 4 * 4096 + 8
    assert found["compiled"] is None
    assert found["fits"] is True
    policies = {one["remat_policy"]: one for one in found["activations"]}
    assert policies["none"]["computed_again"] == 0
    assert (
        policies["full"]["largest_per_device_batch_size"]
        >= policies["minimal"]["largest_per_device_batch_size"]
    )
    assert found["suggestions"]["batch"]["expected"] <= 95 * 2**30


@pytest.mark.slow
def test_too_small_a_target(capsys):
    words = [
        "model_name=llama3.1-405b",
        "attention=dot_product",
        "--target",
        "v5e-256",
        "--no-compile",
    ]
    assert main(["estimate", *words]) == 2
    shown = capsys.readouterr()
    assert "does not fit: " in shown.out
    assert "llama3.1-405b does not fit on v5e-256 (256 x TPU v5e): " in shown.err
    assert "GiB a device too much" in shown.err


WRONG = {
    "target": (["--target", "v5p-129"], "unknown target 'v5p-129': the named sizes of v5p are"),
    "near": (["--target", "v6p-256"], "similar names are"),
    "no_value": (["--target"], "--target needs a value"),
    "slices": (["--target=v5p-8", "--slices", "two"], "--slices takes a whole number"),
    "cpu_slices": (["--target=cpu", "--slices=2"], "only TPU targets have slices"),
    "mesh": (["--target=v5p-128", "ici_fsdp_parallelism=8"], "multiply to 8, which does not make "
                                                             "64 devices"),
    "mesh_target": (["--target=v5p-128", "ici_fsdp_parallelism=8"], "the target is v5p-128 (64 x "
                                                                    "TPU v5p)"),
    "two_targets": (
        ["--target=v5p-128", "compile_topology=v5p-64", "compile_topology_num_slices=1"],
        "name two targets",
    ),
    "two_wishes": (["--search", "--no-compile"], "leave one out"),
    "option": (["--fast"], "unknown option '--fast'"),
    "key": (["stepz=1"], "stepz"),
    "format": (["--format", "xml"], "--format takes json, not 'xml'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes(name, capsys):
    words, expected = WRONG[name]
    assert main(["estimate", *words]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert all(line.startswith("maxtext: error: ") for line in shown.err.splitlines())
    assert not shown.out


@pytest.mark.slow
def test_compiled_for_eight_devices():
    words = [*TINY, "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "--target", "cpu:8"]
    result = run_python("-m", "maxtext", "estimate", *words, environment={})
    assert result.returncode == 0, result.stderr
    assert "default on cpu:8 (8 x cpu): fsdp 4, tensor 2; 2 x 32 tokens a device" in result.stdout
    for part in (
        "temporaries",
        "arguments",
        "outputs",
        "needed",
        "all-gather",
        "all-reduce",
        "fits: ",
        "compiled)",
    ):
        assert part in result.stdout


@pytest.mark.slow
def test_search_compiles_its_suggestions(capsys):
    assert main(["estimate", *TINY, "--search", "--target", "cpu", "--format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["suggestions"]
    for plan in found["suggestions"].values():
        assert plan["measured"] <= found["target"]["memory"]
