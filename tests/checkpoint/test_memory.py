"""A checkpoint of 4 GB is converted in less than 1.5 GB of memory, there and back."""

import shutil

import ml_dtypes
import pytest

from maxtext.checkpoint.convert import Folder, write_theirs

# Llama 3.2's layers, wide enough that the embedding alone is half a gigabyte.
WORDS = [
    "base_emb_dim=2048", "base_num_query_heads=32", "base_num_kv_heads=8", "head_dim=64", "base_mlp_dim=8192",
    "base_num_decoder_layers=25", "vocab_size=128256",
]  # fmt: skip


@pytest.mark.slow
def test_four_gigabytes(llama, run_job, tmp_path):
    if shutil.disk_usage(tmp_path).free < 12e9 + 2e9:
        pytest.skip("needs 14 GB of disk")
    _, _, places = llama.model(*WORDS)
    tensors = llama.their_tensors(places, ml_dtypes.bfloat16)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert 4e9 < total < 4.2e9
    folders = {name: tmp_path / name for name in ("theirs", "ours", "back")}
    try:
        write_theirs(folders["theirs"], llama.Random(tensors), {}, [], 10**9)
        found = run_job({"do": "convert", "words": WORDS} | {name: str(path) for name, path in folders.items()})
        print({name: f"{size / 1e9:.2f} GB" for name, size in found.items()})
        assert 0.5e9 < max(found.values()) < 1.5e9  # the embedding is there at once, and not much else
        back = Folder.open(folders["back"])
        assert back.tensors == tensors
        for name, array in llama.Random(tensors):
            assert back.read(name).tobytes() == array.tobytes()
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
