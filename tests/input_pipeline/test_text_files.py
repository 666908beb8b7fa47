"""The files that a key names, and errors about bad data before training starts."""

import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.types import DatasetType
from maxtext.input_pipeline import ShardSpec, Split, pipeline
from maxtext.input_pipeline.formats import find_files
from tests.support.batches import make_eval_iterator, make_iterator, make_train_iterator


@pytest.fixture
def tree(tmp_path):
    for name in (
        "b.txt",
        "a.md",
        "deep/c.txt",
        "deep/er/d.txt",
        ".hidden",
        ".git/e.txt",
        "f[1].txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("x")
    (tmp_path / "void").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("{}", ["a.md", "b.txt", "deep/c.txt", "deep/er/d.txt", "f[1].txt"]),
        ("{}/b.txt", ["b.txt"]),
        ("{}/*.txt", ["b.txt", "f[1].txt"]),
        ("{}/**/*.txt", ["b.txt", "deep/c.txt", "deep/er/d.txt", "f[1].txt"]),
        ("{}/d*", ["deep/c.txt", "deep/er/d.txt"]),
        ("{}/f[1].txt", ["f[1].txt"]),
        ("{}/.hidden", [".hidden"]),
        # Sorted by path, and each file once, although three parts name it.
        (" {}/b.txt , {}/a.md,{}/b.txt,{}/*.txt,", ["a.md", "b.txt", "f[1].txt"]),
        ("{}/deep/,{}/deep/c.txt", ["deep/c.txt", "deep/er/d.txt"]),
    ],
)
def test_paths(tree, value, names):
    assert find_files("grain_train_files", value.replace("{}", str(tree))) == [
        str(tree / name) for name in names
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{}/missing.txt", r"missing.txt does not exist"),
        ("{}/*.json", r"no file matches .*\*\.json"),
        ("{}/void", r"the directory .*void has no files"),
        ("", "grain_train_files is empty"),
    ],
)
def test_paths_without_files_raise(tree, make_config, value, said):
    with pytest.raises(ConfigError, match=said) as raised:
        make_train_iterator(make_config(grain_train_files=value.replace("{}", str(tree))))
    assert len(raised.value.problems) == 1


def test_all_bad_paths_are_reported_together(tree):
    with pytest.raises(ConfigError) as raised:
        find_files("grain_eval_files", f"{tree}/b.txt,{tree}/one,{tree}/two*")
    assert len(raised.value.problems) == 2


def test_empty_files(make_config, write):
    with pytest.raises(ConfigError, match="all 3 files are empty"):
        make_train_iterator(make_config(grain_train_files=write("", "", "")))


def test_too_little_text_raises_with_token_counts(make_config, write):
    # "abc" and "defgh" make 4 and 6 pairs; a batch is 4 rows of 8.
    config = make_config(grain_train_files=write("abc", "defgh"), global_batch_size_to_load=4)
    with pytest.raises(
        ConfigError, match=r"has 10 tokens in num_epoch=1, but one batch needs 32 \(4 sequences"
    ) as raised:
        make_train_iterator(config)
    (sentence,) = raised.value.problems
    assert all(
        key in sentence for key in ("num_epoch", "per_device_batch_size", "max_target_length")
    )
    assert "use_truncation" not in sentence
    assert len(list(make_train_iterator(config.model_copy(update={"num_epoch": 4})))) == 1


def test_too_little_text_because_of_truncation(make_config, write):
    config = make_config(grain_train_files=write("a" * 100), global_batch_size_to_load=2)
    with pytest.raises(
        ConfigError,
        match=r"has 8 tokens .* needs 16 .*use_truncation=false, which now leaves out 93",
    ):
        make_train_iterator(config)
    assert len(list(make_train_iterator(config.model_copy(update={"use_truncation": False})))) == 6


def test_too_few_documents_without_packing(make_config, write):
    config = make_config(
        grain_train_files=write("abc", "de"), packing=False, global_batch_size_to_load=3
    )
    with pytest.raises(ConfigError, match="7 tokens in 2 documents, one a row"):
        make_train_iterator(config)


def test_fewer_documents_than_streams(make_config, write):
    config = make_config(grain_train_files=write("abc", "de"))
    with pytest.raises(ConfigError, match="2 documents for 3 streams"):
        make_iterator(config, Split.TRAIN, ShardSpec(rows=1, index=0, count=3))


def test_evaluation_without_a_pair(make_config, write):
    config = make_config(grain_eval_files=write("a"), add_bos=False, add_eos=False)
    with pytest.raises(ConfigError, match="grain_eval_files has no document of two tokens"):
        make_eval_iterator(config)


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"dataset_type": DatasetType.HF}, "dataset_type=hf needs hf_path"),
        ({"vocab_size": 100}, "vocab_size=100"),
    ],
)
def test_sources_that_need_other_settings_raise(make_config, write, update, said):
    with pytest.raises(ConfigError, match=said):
        make_train_iterator(make_config(grain_train_files=write("abcdefgh"), **update))


def test_prefetch_is_limited_by_ram_budget(make_config):
    config = make_config(grain_num_threads=4, grain_prefetch_buffer_size=6, grain_ram_budget_mb=10)

    def ahead(*megabytes, chunk=1, known=True, local_streams=1):
        sizes = np.array(megabytes) * 2**20
        facts = {
            "sizes": sizes if known else None,
            "nbytes": int(sizes.sum()),
            "__len__": lambda self: len(sizes),
        }
        documents = type("Documents", (), facts)()
        options = pipeline.read_options(
            config, Split.TRAIN, [pipeline.MixtureComponent(documents)], chunk, local_streams
        )
        return options.prefetch_buffer_size, options.num_threads

    assert ahead(1, 1, 1) == (6, 4)  # all fit, the key stands
    assert ahead(1, 1, 1, chunk=2) == (3, 3)
    assert ahead(4, 1, 4, 4, 1) == (2, 2)  # 4 + 4 + 4 is too much
    assert ahead(100, 1) == (1, 1)
    assert ahead(4, 1, 4, 4, 1, local_streams=2) == (1, 1)
    assert ahead(2, 2, 2, known=False) == (5, 4)  # by the mean
