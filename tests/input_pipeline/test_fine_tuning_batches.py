"""Batches of fine-tuning: masks through packing, pairs, every source, resume, dropped rows."""

import json
import logging

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import DatasetType
from maxtext.input_pipeline import FIELDS, ShardSpec, Split
from maxtext.input_pipeline.encode_rows import encode_pair, encode_row
from maxtext.input_pipeline.formats import encode_example
from tests.input_pipeline.corpora import write_array_records
from tests.support.batches import (
    batch_fields,
    make_eval_iterator,
    make_train_iterator,
    open_data_streams,
)
from tests.tokenizers.tiny import write_bpe

WORDS = ["fox", "dog", "seven wizards", "hot tea", "Äpfel", "日本", "1234"]
LENGTH = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture
def configured(make_config, folder, tmp_path):
    def configure(rows, **update):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {
            "use_sft": True,
            "sft_train_on_completion_only": True,
            "tokenizer_path": str(folder),
            "vocab_size": 512,
            "max_target_length": LENGTH,
            "grain_file_type": "jsonl",
            "grain_train_files": str(path),
            "global_batch_size_to_load": 2,
            "global_batch_size_to_load_eval": 2,
        }
        return make_config(**settings | update)

    return configure


def chats(count, seed=0):
    generator = np.random.default_rng(seed)

    def text():
        return " ".join(generator.choice(WORDS, generator.integers(1, 3)))

    return [
        {
            "messages": [
                {"role": role, "content": f"{text()} {number}"}
                for _ in range(1 + number % 2)
                for role in ("user", "assistant")
            ]
        }
        for number in range(count)
    ]


def pairs(count):
    return [
        {"prompt": f"the fox {number}: ", "chosen": "tea", "rejected": "a lazy dog"}
        for number in range(count)
    ]


def unpack(batches):
    """The (tokens, learned tokens) of each segment, as sets would be: sorted."""
    rows = []
    for batch in batches:
        assert tuple(batch) == FIELDS
        np.testing.assert_array_equal(batch["inputs_position"], batch["targets_position"])
        for row in range(len(batch["inputs"])):
            inputs, positions, segments, targets, _, learned = (
                batch[field][row] for field in FIELDS
            )
            for segment in range(1, segments.max() + 1):
                where = segments == segment
                np.testing.assert_array_equal(positions[where], np.arange(where.sum()))
                assert set(learned[where]) <= {0, segment}
                tokens = [int(inputs[where][0]), *targets[where].tolist()]
                assert tokens[:-1] == inputs[where].tolist()
                rows.append((tokens, [0, *(learned[where] > 0).astype(int).tolist()]))
            assert not learned[segments == 0].any()
    return sorted(rows)


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
@pytest.mark.usefixtures("few_open_rows")
def test_packed_rows_are_the_rows(packing, configured):
    rows = chats(24)
    config = configured(rows, packing=False)
    encoded = [encode_row(row, config) for row in rows]
    expected = sorted(
        (row.ids.tolist(), [0, *row.mask[1:].astype(int).tolist()]) for row in encoded
    )
    assert unpack(make_train_iterator(config)) == expected
    packed = config.model_copy(
        update={
            "packing": True,
            "grain_packing_type": packing,
            "generate_padding_batch_train": True,
        }
    )
    batches = list(make_train_iterator(packed))
    assert unpack(batches) == expected
    assert max(batch["inputs_segmentation"].max() for batch in batches) > 1


def test_padding_that_equals_the_end_token_masks_nothing(configured, tmp_path, folder):
    other = write_bpe(tmp_path / "pad")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    config = configured([{"prompt": "a", "completion": "fox"}] * 2, packing=False)
    config = config.model_copy(update={"tokenizer_path": str(other)})
    (batch,) = make_train_iterator(config)
    end = int(np.flatnonzero(batch["targets"][0] == 2)[0])
    assert batch["targets_segmentation"][0, end] == 1
    assert not batch["targets_segmentation"][0, end + 1 :].any()


def test_long_conversations_are_truncated_and_never_split(configured):
    rows = chats(4)
    config = configured(rows, max_target_length=24, packing=True, generate_padding_batch_train=True)
    whole = [encode_row(row, config.model_copy(update={"max_target_length": 999})) for row in rows]
    starts = [row.ids[:25].tolist() for row in whole if row.mask[1:25].any()]
    assert [tokens for tokens, _ in unpack(make_train_iterator(config))] == sorted(starts)


def test_dropped_rows_are_counted_and_reported(configured, caplog, monkeypatch):
    monkeypatch.setattr("maxtext.common.log.LOGGER.propagate", True)
    rows = [*chats(4), {"messages": [{"role": "user", "content": "nobody"}]}] * 2
    config = configured(rows, packing=False, num_epoch=2, max_target_length=200)
    with caplog.at_level(logging.WARNING):
        batches = list(make_train_iterator(config))
    assert sum((batch["inputs_segmentation"][:, 0] > 0).sum() for batch in batches) == 16
    dropped = [record.getMessage() for record in caplog.records if "dropped" in record.message]
    assert len(dropped) == 2  # rows 5 and 10, in both epochs
    assert "are dropped, since no token is trained on: 2 so far, first" in dropped[-1]
    assert dropped[-1].endswith("rows.jsonl, line 5")


def test_data_without_a_learned_token_raises(configured):
    config = configured([{"messages": [{"role": "user", "content": "nobody"}]}] * 4)
    with pytest.raises(ConfigError, match="grain_train_files has no row with a token to train on"):
        make_train_iterator(config)


def test_bad_rows_are_bad_records(configured):
    rows = [*chats(3), {"messages": [{"role": "bot", "content": "x"}]}, *chats(3)]
    with pytest.raises(
        UserError, match=r"rows.jsonl, line 4: message 0 .*'bot'.*max_bad_records=0"
    ):
        list(make_train_iterator(configured(rows, packing=False)))
    config = configured(rows, packing=False, max_bad_records=1)
    assert len(list(make_train_iterator(config))) == 3


def test_columns_are_checked_before_training(configured):
    rows = [{"body": "x", "id": 1}] * 2
    with pytest.raises(ConfigError, match="grain_train_files: the columns body, id are no form"):
        make_train_iterator(configured(rows))
    config = configured(chats(2), train_data_columns=["texts"])
    with pytest.raises(ConfigError, match="has no column 'texts', only messages"):
        make_train_iterator(config)


RESUMED = {
    "first_fit": {},
    "best_fit": {"grain_packing_type": "best_fit"},
    "unpacked": {"packing": False},
    "pairs": {"use_sft": False, "use_dpo": True, "packing": False},
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.usefixtures("few_open_rows")
def test_resumes_at_the_next_batch(name, configured):
    rows = pairs(20) if name == "pairs" else chats(20)
    config = configured(
        rows,
        enable_data_shuffling=True,
        grain_shuffle_buffer_size=5,
        num_epoch=2,
        **RESUMED[name],
    )
    whole = make_train_iterator(config)
    expected, states = [], []
    for batch in whole:
        expected.append(batch)
        states.append(json.loads(json.dumps(whole.get_state())))
    assert len(expected) > 4
    for position in (0, 1, len(expected) // 2):
        resumed = make_train_iterator(config)
        resumed.set_state(states[position])
        rest = list(resumed)
        assert len(rest) == len(expected) - position - 1
        for batch, other in zip(rest, expected[position + 1 :], strict=True):
            for field in batch_fields(config):
                np.testing.assert_array_equal(batch[field], other[field])
    assert len({batch[batch_fields(config)[0]].tobytes() for batch in expected}) > 4


def documents(config, split):
    return chats(8) if split == "train" else None


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("source", ["parquet", "arrayrecord", "hf", "hf stream", "custom"])
def test_every_source_gives_the_same_rows(source, configured, tmp_path):
    rows = chats(8)
    common = {"packing": False, "num_epoch": 1}
    expected = unpack(make_train_iterator(configured(rows, **common)))
    path = tmp_path / f"data.{source}"
    if source == "parquet":
        write_parquet(path, rows)
        update = {"grain_file_type": "parquet", "grain_train_files": str(path)}
    elif source == "arrayrecord":
        examples = [encode_example({"messages": json.dumps(row["messages"])}) for row in rows]
        write_array_records(path, examples)
        update = {"grain_file_type": "arrayrecord", "grain_train_files": str(path)}
    elif source == "custom":
        update = {"dataset_type": DatasetType(f"{__name__}:documents")}
    else:
        (tmp_path / "data").mkdir()
        path = tmp_path / "data" / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        update = {"dataset_type": DatasetType.HF}
        if source == "hf":
            update |= {"hf_path": "json", "hf_train_files": str(path)}
        else:
            pytest.importorskip("datasets")
            update |= {"hf_path": str(path.parent)}
    assert unpack(make_train_iterator(configured(rows, **common | update))) == expected


@pytest.mark.slow
def test_batches_do_not_depend_on_the_batch_size_or_workers(configured):
    """As in pre-training: the rows of a run are those of its streams, in order."""
    rows, sequences = chats(12), []
    for size, workers in ((2, 0), (3, 1)):
        config = configured(rows, packing=False, data_streams=1, grain_worker_count=workers)
        streams = open_data_streams(config, Split.TRAIN, lambda step, size=size: size, [size])
        sequences.append(np.concatenate([batch["targets"] for batch in streams]))
        streams.close()
    np.testing.assert_array_equal(*sequences)


def test_pairs(configured):
    rows = pairs(5)
    config = configured(
        rows, use_sft=False, use_dpo=True, packing=False, generate_padding_batch_train=True
    )
    batches = list(make_train_iterator(config))
    assert [len(batch["chosen_inputs"]) for batch in batches] == [2, 2, 2]
    for number, row in enumerate(rows):
        batch = {field: value[number % 2] for field, value in batches[number // 2].items()}
        assert tuple(batch) == batch_fields(config)
        pair = encode_pair(row, config)
        for side in ("chosen", "rejected"):
            completion = getattr(pair, side)
            tokens = np.concatenate([pair.prompt, completion])
            count, first = len(tokens) - 1, len(pair.prompt) - 1
            padding = np.zeros(LENGTH - count, np.int32)
            ones = np.append(np.ones(count, np.int32), padding)
            learned = ones.copy()
            learned[:first] = 0
            expected = {
                "inputs": np.append(tokens[:-1], padding),
                "inputs_position": np.append(np.arange(count), padding),
                "inputs_segmentation": ones,
                "targets": np.append(tokens[1:], padding),
                "targets_position": np.append(np.arange(count), padding),
                "targets_segmentation": learned,
            }
            assert learned.sum() == len(completion)
            for field, value in expected.items():
                np.testing.assert_array_equal(batch[f"{side}_{field}"], value)
                assert batch[f"{side}_{field}"].dtype == np.int32
    padding = {field: value[1] for field, value in batches[-1].items()}
    assert not any(value.any() for value in padding.values())


@pytest.mark.parametrize("method", ["use_sft", "use_dpo"])
def test_evaluation_reads_every_row(method, configured):
    rows = pairs(3) if method == "use_dpo" else chats(3)
    config = configured(
        rows, use_sft=method == "use_sft", use_dpo=method == "use_dpo", packing=False
    )
    config = config.model_copy(update={"grain_eval_files": config.grain_train_files})
    batches = list(make_eval_iterator(config))
    segmentation = batch_fields(config)[2]
    used = np.concatenate([batch[segmentation][:, 0] for batch in batches])
    assert used.tolist() == [1, 1, 1, 0]


def test_too_few_pairs(configured):
    config = configured(pairs(3), use_sft=False, use_dpo=True, packing=False)
    with pytest.raises(ConfigError, match="has 3 pairs in num_epoch=1, but one batch needs 4"):
        make_train_iterator(config, ShardSpec(4))


def test_rows_without_tokens_to_train_on_are_not_read_forever(configured):
    rows = [{"messages": [{"role": "user", "content": "hi"}]}] * 3
    config = configured(rows, packing=True, num_epoch=2**31 - 1)
    with pytest.raises(ConfigError, match="has no row with a token to train on"):
        next(make_train_iterator(config, ShardSpec(4)))


def test_synthetic_pairs_share_the_prompt(configured):
    config = configured(
        [], use_sft=False, use_dpo=True, packing=False, dataset_type=DatasetType.SYNTHETIC
    )
    batch = next(make_train_iterator(config))
    assert tuple(batch) == batch_fields(config)
    same = batch["chosen_targets"] == batch["rejected_targets"]
    learned = batch["chosen_targets_segmentation"] == 1
    assert same[~learned].all()
    assert not same[learned].all()
    assert 0 < learned.mean() < 1
