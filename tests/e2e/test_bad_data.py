"""Invalid data: one error message, exit code 2, and no files."""

import pytest

TEXT = (
    "dataset_type=grain", "grain_file_type=text", "tokenizer_path=byte", "grain_worker_count=0",
    "grain_worker_count_eval=0",
)  # fmt: skip


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "a.txt").write_text("")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("too short")
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a.txt").write_text("a text that is long enough " * 50)
    return tmp_path


CASES = {
    "no files named": (TEXT, "grain_train_files is empty: name the files to read"),
    "no such file": ((*TEXT, "grain_train_files={}/none.txt"), "does not exist"),
    "no file matches": ((*TEXT, "grain_train_files={}/*.md"), "no file matches"),
    "an empty folder": ((*TEXT, "grain_train_files={}/empty"), "has no files"),
    "empty files": ((*TEXT, "grain_train_files={}/hollow"), "are empty"),
    "too little text": ((*TEXT, "grain_train_files={}/short"), "one batch needs 128"),
    "empty evaluation files": (
        (*TEXT, "grain_train_files={}/good", "use_truncation=false", "grain_eval_files={}/hollow",
         "eval_interval=1"),
        "all 1 files are empty",
    ),
    "no evaluation data": (
        (*TEXT, "grain_train_files={}/good", "use_truncation=false", "eval_interval=1"),
        "eval_interval=1 needs evaluation data: set grain_eval_files",
    ),
    "endless evaluation data": (("eval_interval=1",), "set eval_steps"),
    "a vocabulary that is too small": (
        (*TEXT, "grain_train_files={}/good", "vocab_size=200"), "set vocab_size to 259 or more",
    ),
    "another format": (
        (*TEXT[:1], "grain_train_files={}/good", "grain_file_type=arrayrecord"),
        "is not an ArrayRecord file",
    ),
    "another source": (("dataset_type=hf",), "dataset_type=hf needs hf_path"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_data_is_one_error_and_leaves_no_files(train, corpus, case):
    overrides, sentence = CASES[case]
    result = train(*(override.format(corpus) for override in overrides), base=corpus / "out")
    assert result.code == 2
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("maxtext: error: ")
    assert sentence in lines[0]
    assert result.out == ""
    assert not (corpus / "out").exists()
