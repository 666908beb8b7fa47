"""The batch of a fine-tuning run whose user chose no size: it fits the data."""

import json

import pytest

from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.fit_batch import fit_batch

MODEL = (
    "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=8",
    "base_mlp_dim=32", "base_num_decoder_layers=1", "tokenizer_path=byte", "vocab_size=259",
    "dataset_type=grain", "grain_file_type=jsonl", "grain_worker_count=0", "add_bos=false",
)  # fmt: skip
SFT = ("use_sft=true", "packing=true", "add_eos=false")
DPO = ("use_dpo=true", "packing=false", "add_eos=false")


@pytest.fixture
def fitted(tmp_path):
    """The configuration that fits rows of data; None if it stays as it is."""

    def fit(rows, *overrides):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        overrides = [*MODEL, f"grain_train_files={path}", *overrides]
        config = load(None, overrides, environ={}, devices=Devices(1))
        return fit_batch(build_run_context(config))

    return fit


def texts(count, length):
    return [{"prompt": "a" * (length - 1), "completion": "b"} for _ in range(count)]


def pairs(count, length):
    return [{"prompt": "p", "chosen": "c" * (length - 1), "rejected": "r"} for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "length", "batch"),
    [
        # 64 rows of 9 targets: 576 tokens, an eighth of which is 72, in a row of 128.
        pytest.param(64, 10, (1, 128), id="short"),
        # 30 rows of 599 targets, 17,970 tokens, an eighth of which would be a row of 4096.
        pytest.param(30, 600, (1, 2048), id="long"),
        pytest.param(1, 10, (1, 32), id="one"),
    ],
)
def test_packed_rows(fitted, count, length, batch):
    config = fitted(texts(count, length), *SFT)
    assert (config.per_device_batch_size, config.max_target_length) == batch
    assert config.global_batch_size_to_train_on == batch[0]
    assert config.source("per_device_batch_size").kind == "derived"


def test_data_that_fills_a_batch_keeps_it(fitted):
    assert fitted(texts(60, 600), *SFT) is None


def test_pairs_have_the_length_of_the_longest(fitted):
    config = fitted(pairs(20, 40), *DPO)
    assert (config.per_device_batch_size, config.max_target_length) == (12, 64)
    config = fitted(pairs(11, 40), *DPO)
    assert (config.per_device_batch_size, config.max_target_length) == (1, 64)
    assert fitted(pairs(20, 2000), *DPO) is None


def test_keys_that_the_user_sets_stay(fitted):
    config = fitted(texts(64, 10), *SFT, "per_device_batch_size=2")
    assert (config.per_device_batch_size, config.max_target_length) == (2, 64)
    config = fitted(texts(40, 10), *SFT, "max_target_length=48")
    assert (config.per_device_batch_size, config.max_target_length) == (1, 48)
    both = ("per_device_batch_size=2", "max_target_length=48")
    assert fitted(texts(64, 10), *SFT, *both) is None


def test_pretraining_keeps_its_batch(fitted):
    assert fitted([{"text": "a" * 40}] * 9) is None
