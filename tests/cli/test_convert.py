"""`maxtext convert`: there and back bit for bit, and what is refused with one sentence and nothing
written.
"""

import json
import re
import shutil

import numpy as np
import pytest

from maxtext.cli.main import main

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny Mixtral in bfloat16, in several shards, with a tokenizer's file beside it."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("mixtral")
    transformers.MixtralForCausalLM(config).bfloat16().save_pretrained(path, max_shard_size="8KB")
    (path / "tokenizer.json").write_text("{}")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def tensors(folder):
    from maxtext.checkpoint.safetensors_reader import SafetensorsFolder

    opened = SafetensorsFolder.open(folder)
    return {name: opened.read(name) for name in opened.tensors}


def convert(*args):
    return main(["convert", *map(str, args)])


def test_round_trip(source, tmp_path, capsys):
    assert convert("from_hf", source, tmp_path / "ours") == 0
    assert convert("to_hf", tmp_path / "ours", tmp_path / "theirs") == 0
    before, after = tensors(source), tensors(tmp_path / "theirs")
    first, command, second, _ = capsys.readouterr().out.splitlines()
    nbytes = sum(tensor.nbytes for tensor in before.values())
    # A Mixtral's experts are a tensor each there, and stacked in three a layer here.
    stacked = len(before) - 3 * 3 * (3 - 1)
    assert (
        first == f"wrote {tmp_path / 'ours'}: {stacked} tensors, bfloat16, {nbytes / 1024:.4g} KiB"
    )
    assert (
        second
        == f"wrote {tmp_path / 'theirs'}: {len(before)} tensors, bfloat16, {nbytes / 1024:.4g} KiB"
    )
    assert command == f"try it with: maxtext decode {tmp_path / 'ours'} prompt='I love to'"
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert (tensor.view(np.uint16) == after[name].view(np.uint16)).all()
    assert (tmp_path / "theirs" / "tokenizer.json").read_text() == "{}"
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "theirs")
    ]
    assert configs[0] == configs[1]


def test_a_folder_without_a_tokenizer_needs_one(source, tmp_path, capsys):
    for name in source.glob("tokenizer*"):
        name.unlink()
    assert convert("from_hf", source, tmp_path / "ours") == 0
    assert "prompt='I love to' tokenizer_path=TOKENIZER (the" in capsys.readouterr().out


def test_dtype_option(source, tmp_path):
    assert convert("from_hf", source, tmp_path / "ours", "--dtype", "float32") == 0
    assert convert("to_hf", tmp_path / "ours", tmp_path / "half", "--dtype=float16") == 0
    for name, tensor in tensors(tmp_path / "half").items():
        assert tensor.dtype == np.float16
        np.testing.assert_array_equal(
            tensor, tensors(source)[name].astype(np.float32).astype(np.float16)
        )
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"


def truncated(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])


def no_shard(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def shape_mismatch(folder):
    change(folder, intermediate_size=32)


def one_layer_less(folder):
    change(folder, num_hidden_layers=2)


def one_layer_more(folder):
    change(folder, num_hidden_layers=4)


def unknown(folder):
    change(folder, architectures=["MambaForCausalLM"])


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text('{"architectures": ')


def no_size(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))


def strange_rope(folder):
    change(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4})


def strange_activation(folder):
    change(folder, hidden_act="xielu")


def quantized(folder):
    change(folder, quantization_config={"quant_method": "gptq"})


def only_a_pickle(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


BAD_FOLDERS = {
    truncated: "maxtext: error: .*model-00001.*",
    no_shard: "model-00002.*",
    shape_mismatch: "block_sparse_moe.*has shape \\[24, 16\\], the model needs \\[32, 16\\].* more",
    one_layer_less: "model.layers.2.*is not a tensor of this model",
    one_layer_more: "model.layers.3.*is missing",
    unknown: "the architecture MambaForCausalLM is not known; these are: ",
    no_config: "has no config.json",
    broken_config: "config.json is not valid JSON",
    # as the class has it
    no_size: "embed_tokens.weight has shape \\[50, 16\\], the model needs \\[50, 4096\\]",
    strange_rope: "rope_type='dynamic' is not supported",
    strange_activation: "the activation 'xielu' is not supported",
    quantized: "the weights are quantized \\(gptq\\)",
    only_a_pickle: "pickle files are never loaded",
}


@pytest.mark.parametrize("spoil", BAD_FOLDERS, ids=lambda spoil: spoil.__name__)
def test_bad_folders(source, tmp_path, capsys, spoil):
    folder = tmp_path / "bad"
    shutil.copytree(source, folder)
    spoil(folder)
    assert convert("from_hf", folder, tmp_path / "out") in (1, 2)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("\n") == 1
    assert re.search(BAD_FOLDERS[spoil], error), error
    assert {path.name for path in tmp_path.iterdir()} == {"bad"}


def test_existing_output_is_not_overwritten(source, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert convert("from_hf", source, tmp_path / "out") == 1
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        ([], 2, "name a task: maxtext convert from_hf|to_hf|params-only|merge-adapter"),
        (["sideways", "a", "b"], 2, "unknown task 'sideways' of maxtext convert"),
        (["from_hf", "a"], 2, "OUT is missing: maxtext convert from_hf DIR OUT [--dtype DTYPE]"),
        (
            ["from_hf", "a", "b", "--dtype", "int3"],
            2,
            "--dtype takes float32 or bfloat16 or float16",
        ),
        (["from_hf", "nowhere", "out"], 1, "there is no folder nowhere"),
    ],
)
def test_bad_arguments(args, code, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert(*args) == code
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
