"""A checkpoint of 1 GB is converted to native weights and back in less than 0.375 GB of memory."""

import shutil

import ml_dtypes
import pytest

from maxtext.checkpoint.convert import SafetensorsFolder, write_hf_folder

# Llama 3.2's vocabulary and MLP, with an embedding that alone is an eighth of it all.
WORDS = [
    "base_emb_dim=512",
    "base_num_query_heads=32",
    "base_num_kv_heads=8",
    "head_dim=16",
    "base_mlp_dim=8192",
    "base_num_decoder_layers=29",
    "vocab_size=128256",
]


@pytest.mark.slow
def test_one_gigabyte(llama, run_job, tmp_path):
    if shutil.disk_usage(tmp_path).free < 4e9:
        pytest.skip("needs 4 GB of disk")
    _, _, param_infos = llama.model(*WORDS)
    tensors = llama.their_tensors(param_infos, ml_dtypes.bfloat16)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert 1e9 < total < 1.05e9
    folders = {name: tmp_path / name for name in ("hf", "native", "back")}
    try:
        write_hf_folder(folders["hf"], llama.Random(tensors), {}, [], 10**9 // 4)
        peaks = run_job(
            {"do": "convert", "words": WORDS} | {name: str(path) for name, path in folders.items()}
        )
        print({name: f"{size / 1e9:.2f} GB" for name, size in peaks.items()})
        assert (
            0.13e9 < max(peaks.values()) < 0.375e9
        )  # the embedding is there at once, and not much else
        back = SafetensorsFolder.open(folders["back"])
        assert back.tensors == tensors
        for name, array in llama.Random(tensors):
            assert back.read(name).tobytes() == array.tobytes()
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
