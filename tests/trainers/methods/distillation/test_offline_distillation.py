"""Logits of a teacher in files, and a student that learns from them; torch is the oracle."""

import pickle

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from array_record.python.array_record_module import ArrayRecordWriter

from maxtext.checkpoint.open import open_checkpoint
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.trees import flatten_dict
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.input_pipeline.interface import ShardSpec, Split
from maxtext.input_pipeline.row_formats import DOCUMENTS
from maxtext.input_pipeline.teacher_logits import teacher_logits_source
from maxtext.models.configuration import load
from maxtext.trainers.checkpointing.init_state import initial_weights
from maxtext.trainers.methods.distillation import write_logits as write_logits_module
from maxtext.trainers.methods.distillation.write_logits import frozen_context, write_logits
from tests.support.distillation import (
    ALPHA,
    PROBE,
    RATE,
    RUN,
    TEMPERATURE,
    Run,
    save_llama,
)
from tests.trainers.conftest import LENGTH, VOCABULARY, with_defaults

TOP_K, ROWS, STEPS = 5, 4, 3


def configure(folder, *overrides):
    keys = [f"load_parameters_path={folder}", *RUN]
    keys = [key for key in keys if not key.startswith("distill_")]
    return load(
        None,
        from_overrides(with_defaults(overrides, keys)),
        environ={},
        devices=Devices(1),
        model=open_checkpoint(folder).model_layer,
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return folder, save_llama(folder, layers=2, embed_dim=24, seed=1)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    return folder, save_llama(folder, layers=1, embed_dim=16, seed=0)


@pytest.fixture(scope="module")
def write(teacher):
    """Write batches of synthetic rows, one batch a part."""

    def run(folder, steps, *overrides):
        data = ("dataset_type=synthetic", f"per_device_batch_size={ROWS}", f"steps={steps}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(write_logits_module, "PART_TOKENS", 1)
            return write_logits(configure(teacher[0], *data, *overrides), folder, TOP_K)

    return run


@pytest.fixture(scope="module")
def logits(write, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits") / "set"
    assert write(folder, STEPS, "num_vocab_tiling=2") == (STEPS, STEPS * ROWS)
    return folder


def rows_of(folder, student, shard, *overrides):
    config = configure(student[0], f"offline_data_dir={folder}", *overrides)
    return teacher_logits_source(config, Split.TRAIN, DOCUMENTS, shard)


def test_written_logits_are_the_largest_of_the_teacher(logits, teacher, student):
    batch = next(rows_of(logits, student, ShardSpec(rows=STEPS * ROWS)))
    assert batch["top_k_logits"].shape == (STEPS * ROWS, LENGTH, TOP_K)
    with torch.no_grad():
        expected = teacher[1](torch.tensor(batch["inputs"]).long()).logits
    values, indices = torch.topk(expected, TOP_K)
    np.testing.assert_allclose(batch["top_k_logits"], values, rtol=2e-3, atol=2e-3)
    assert (batch["top_k_indices"] == indices.numpy()).mean() > 0.99  # float32 ties aside


def test_interrupted_job_writes_what_is_missing(logits, write, tmp_path):
    folder = tmp_path / "again"
    assert write(folder, 1) == (1, ROWS)
    assert write(folder, STEPS) == (STEPS - 1, (STEPS - 1) * ROWS)
    assert write(folder, STEPS) == (0, 0)
    with pytest.raises(UserError, match="part-00000.parquet holds other rows than the data"):
        write(folder, STEPS, "enable_data_shuffling=false", "data_streams=2")
    with pytest.raises(ConfigError, match="was written with data_shuffle_seed=0, not 5"):
        write(folder, STEPS, "data_shuffle_seed=5")


def test_streams_share_the_rows_and_resume(logits, student):
    everything = next(rows_of(logits, student, ShardSpec(rows=STEPS * ROWS)))["inputs"]
    streams = [
        rows_of(logits, student, ShardSpec(rows=2, index=index, count=2, min_rows=1), "num_epoch=2")
        for index in (0, 1)
    ]
    read = [np.concatenate([batch["inputs"] for batch in stream]) for stream in streams]
    for index, rows in enumerate(read):
        np.testing.assert_array_equal(rows, np.concatenate([everything[index::2]] * 2))
    first, second = (
        rows_of(logits, student, ShardSpec(rows=2, count=2, min_rows=1)) for _ in range(2)
    )
    next(first)
    second.set_state(first.get_state())
    np.testing.assert_array_equal(next(first)["inputs"], next(second)["inputs"])


def test_update_from_files_equals_torch(logits, student, quickly):
    batch = next(rows_of(logits, student, ShardSpec(rows=8)))
    model = transformers.LlamaForCausalLM.from_pretrained(student[0])
    inputs, targets = (torch.tensor(batch[name]).long() for name in ("inputs", "targets"))
    student_logits = model(inputs).logits
    places = torch.tensor(batch["top_k_indices"]).long()
    p = torch.log_softmax(torch.tensor(batch["top_k_logits"]).float() / TEMPERATURE, -1)
    q = torch.log_softmax(student_logits.gather(-1, places) / TEMPERATURE, -1)
    soft = TEMPERATURE**2 * (p.exp() * (p - q)).sum(-1).mean()
    hard = torch.nn.functional.cross_entropy(student_logits.flatten(0, 1), targets.flatten())
    loss = ALPHA * soft + (1 - ALPHA) * hard
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    run = Run({"student": student[0]}, f"offline_data_dir={logits}", quickly=quickly)
    state, metrics = run.step(run.state(), batch)
    expected = {"loss": loss, "soft_loss": soft, "hard_loss": hard}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-5), name
    assert "teacher_loss" not in metrics
    with torch.no_grad():
        logits = model(torch.tensor(PROBE)).logits
    np.testing.assert_allclose(run.logits(state.weights, PROBE), logits, atol=2e-5)


def test_rows_of_another_length_and_other_folders_are_refused(logits, student, tmp_path):
    with pytest.raises(ConfigError, match=f"rows of {LENGTH} tokens, and this run has"):
        rows_of(logits, student, ShardSpec(rows=1), "max_target_length=32")
    with pytest.raises(UserError, match="holds no logits of a teacher"):
        rows_of(tmp_path, student, ShardSpec(rows=1))
    with pytest.raises(ConfigError, match=f"not between 1 and vocab_size={VOCABULARY}"):
        write_logits(configure(student[0]), tmp_path, VOCABULARY + 1)


SHARD = ShardSpec(rows=ROWS)
RECORDED = {"tokens": "inputs", "top_k_logits": "top_k_logits", "top_k_indices": "top_k_indices"}
OPTIONAL = ("inputs_position", "inputs_segmentation", "targets", "targets_segmentation")


def to_pickle(arrays):
    return pickle.dumps(arrays)


def write_records(folder, batches, to_bytes, optional=OPTIONAL):
    """Two files of a batch a record, as MaxText writes them."""
    folder.mkdir()
    for number, part in enumerate((batches[:2], batches[2:])):
        path = folder / f"teacher_top_k_part_{number:05d}.array_record"
        writer = ArrayRecordWriter(str(path), "group_size:1000")
        for batch in part:
            arrays = {name: batch[field] for name, field in RECORDED.items()}
            arrays |= {name: batch[name] for name in optional}
            arrays["top_k_logits"] = arrays["top_k_logits"].astype(np.float32)
            writer.write(to_bytes(arrays))
        writer.close()
    return folder


@pytest.mark.parametrize("to_bytes", [safetensors.numpy.save, to_pickle])
def test_array_records_give_the_same_rows(logits, student, tmp_path, to_bytes):
    batches = list(rows_of(logits, student, ShardSpec(rows=ROWS)))
    folder = write_records(tmp_path / "records", batches, to_bytes)
    actual = list(rows_of(folder, student, ShardSpec(rows=ROWS)))
    assert len(actual) == len(batches) == STEPS
    for batch, expected in zip(actual, batches, strict=True):
        assert batch.keys() == expected.keys()
        for name, field in expected.items():
            assert batch[name].dtype == field.dtype, name
            np.testing.assert_array_equal(batch[name], field, err_msg=name)


def test_absent_fields_of_array_records_follow_from_the_tokens(logits, student, tmp_path):
    batch = next(rows_of(logits, student, ShardSpec(rows=ROWS)))
    segments = np.ones((ROWS, LENGTH), np.int32)
    segments[:, 5:12], segments[:, 12:] = 2, 0
    batch |= {"inputs_segmentation": segments}
    folder = write_records(
        tmp_path / "records", [batch], to_pickle, optional=("inputs_segmentation",)
    )
    read = next(rows_of(folder, student, ShardSpec(rows=ROWS)))
    row = {name: field[0].tolist() for name, field in read.items()}
    tokens = batch["inputs"][0].tolist()
    assert row["targets"] == [*tokens[1:], 0]
    assert row["targets_segmentation"] == [1] * 4 + [0] + [2] * 6 + [0] * 5
    assert row["inputs_position"][:12] == [*range(5), *range(7)]


def test_records_that_are_no_arrays_are_refused(logits, student, tmp_path):
    batches = list(rows_of(logits, student, ShardSpec(rows=ROWS)))

    def read(name, batches, to_bytes=to_pickle):
        return list(rows_of(write_records(tmp_path / name, batches, to_bytes), student, SHARD))

    with pytest.raises(UserError, match="record 0 of .* names builtins.print, which is no array"):
        read("code", batches, lambda arrays: pickle.dumps({"tokens": print}))
    with pytest.raises(UserError, match="has no top_k_indices"):
        read("short", batches, lambda arrays: to_pickle({"tokens": 0, "top_k_logits": 0}))
    with pytest.raises(UserError, match=f"has 2 rows of {LENGTH} tokens, not {ROWS}"):
        read("uneven", [batches[0], {name: field[:2] for name, field in batches[1].items()}])
    larger = batches[0] | {"top_k_indices": batches[0]["top_k_indices"] + VOCABULARY}
    with pytest.raises(ConfigError, match="or more, and this run has vocab_size"):
        read("larger", [larger])


def test_norms_of_the_teacher_are_not_rounded(teacher):
    """In bfloat16; matrices are stored as layers cast them."""
    weights = initial_weights(frozen_context(configure(teacher[0], "dtype=bfloat16")))
    for path, weight in flatten_dict(weights).items():
        assert weight.dtype == ("float32" if path[-1] == "scale" else "bfloat16"), path


def test_teacher_of_a_distillation_writes_its_logits(teacher, student, logits, tmp_path):
    """`distill-logits` with the keys of `maxtext distill`, which name a student, too."""
    config = configure(
        student[0],
        f"teacher_overrides.load_parameters_path={teacher[0]}",
        "dataset_type=synthetic",
        f"per_device_batch_size={ROWS}",
        "steps=1",
    )
    assert write_logits(config, tmp_path / "set", TOP_K) == (1, ROWS)
    batch, expected = (
        next(rows_of(folder, student, SHARD)) for folder in (tmp_path / "set", logits)
    )
    np.testing.assert_array_equal(batch["top_k_indices"], expected["top_k_indices"])
