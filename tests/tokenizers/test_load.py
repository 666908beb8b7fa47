"""Which tokenizer a configuration selects, and the errors for wrong ones."""

import json
import logging
import shutil
import sys

import pytest

from maxtext.common.errors import ConfigError, MissingExtra
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load as load_config
from maxtext.tokenizers import find_tokenizer, load_tokenizer, open_tokenizer


def load(path, *overrides):
    overrides = [f"tokenizer_path={path}", *overrides]
    return load_tokenizer(load_config(None, overrides, environ={}, devices=Devices(1)))


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "tiktoken"])
def test_detects_the_kind_from_the_content(kind, paths):
    assert load(paths[kind]).kind == kind
    assert load(paths[kind], f"tokenizer_type={kind}").kind == kind


def test_opens_a_tokenizer_json_of_any_name_and_folders(
    bpe, sentencepiece_file, tiktoken_file, tmp_path
):
    shutil.copy(bpe / "tokenizer.json", tmp_path / "mine.json")
    assert load(tmp_path / "mine.json").kind == "huggingface"
    assert load(sentencepiece_file.parent).kind == "sentencepiece"
    # Llama 3 uses this name, too.
    shutil.copy(tiktoken_file, tmp_path / "tokenizer.model")
    assert load(tmp_path).kind == "tiktoken"


def test_tokenizer_type_chooses_in_a_folder_of_both(bpe, sentencepiece_file, tmp_path):
    shutil.copytree(bpe, tmp_path, dirs_exist_ok=True)
    shutil.copy(sentencepiece_file, tmp_path)
    assert load(tmp_path).kind == "huggingface"
    assert load(tmp_path, "tokenizer_type=sentencepiece").kind == "sentencepiece"


@pytest.mark.parametrize(
    ("kind", "tokenizer_type"), [("huggingface", "tiktoken"), ("sentencepiece", "huggingface")]
)
def test_rejects_a_tokenizer_type_that_differs_from_the_content(kind, tokenizer_type, paths):
    with pytest.raises(
        ConfigError,
        match=f"is a {kind} tokenizer, but tokenizer_type={tokenizer_type}: set "
        f"tokenizer_type={kind}",
    ):
        load(paths[kind], f"tokenizer_type={tokenizer_type}")


def test_the_type_of_a_model_does_not_apply_to_another_path(sentencepiece_file):
    overrides = ["model_name=qwen3-0.6b", f"tokenizer_path={sentencepiece_file}"]
    config = load_config(None, overrides, environ={}, devices=Devices(1))
    assert config.tokenizer_type.value == "huggingface"
    assert load_tokenizer(config).kind == "sentencepiece"


@pytest.mark.parametrize(
    ("kind", "size"), [("huggingface", 400), ("sentencepiece", 400), ("tiktoken", 576)]
)
def test_rejects_a_vocabulary_that_is_too_large(kind, size, paths):
    assert load(paths[kind], f"vocab_size={size}").vocab_size == size
    with pytest.raises(
        ConfigError,
        match=rf"has {size} ids, but vocab_size={size - 1}: set vocab_size to {size} or more",
    ):
        load(paths[kind], f"vocab_size={size - 1}")


def test_vocab_size_is_the_largest_id_plus_one(bpe, tmp_path):
    """A vocabulary with a gap: the largest id counts, not the number of tokens."""
    shutil.copytree(bpe, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    last = max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    tokenizer["model"]["vocab"][last] = 900
    file.write_text(json.dumps(tokenizer))
    assert load(tmp_path).vocab_size == 901
    assert (
        load(tmp_path).decode([5, 500, 6])
        == f"{load(tmp_path).decode([5])}\ufffd{load(tmp_path).decode([6])}"
    )


def test_ignores_truncation_and_padding_of_the_file(bpe, tmp_path):
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox jumps over it"
    assert load(tmp_path).encode(text) == load(bpe).encode(text)
    assert load(tmp_path).encode_with_specials(text) == load(bpe).encode(text)
    assert load(tmp_path).encode_batch([text])[0].tolist() == load(bpe).encode(text)


def test_reads_special_tokens_next_to_the_file(bpe, tmp_path):
    shutil.copy(bpe / "tokenizer.json", tmp_path)
    assert (load(tmp_path).bos_id, load(tmp_path).eos_id, load(tmp_path).pad_id) == (None, None, 0)
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}}'
    )
    assert (load(tmp_path).bos_id, load(tmp_path).eos_id) == (1, 4)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "add_bos_token": true, "pad_token": null}'
    )
    assert (load(tmp_path).bos_id, load(tmp_path).eos_id, load(tmp_path).pad_id) == (1, 2, 0)
    assert load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def ranks(*lines):
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", b"", "is not a Hugging Face tokenizer"),
        ("tokenizer.json", b"{}", "is not a Hugging Face tokenizer"),
        ("tokenizer.json", b'{"version": "1.0", "model"', "is not a Hugging Face tokenizer"),
        ("x.model", b"", "is not a SentencePiece model"),
        ("x.model", b"\x00\xff" * 500, "is not a SentencePiece model"),
        ("x.txt", b"some words\nof text", "is not a SentencePiece model"),
        ("x.tiktoken", ranks("IQ== 0", "broken"), "line 2: not a token in base64"),
        ("x.tiktoken", ranks("IQ== 0", "I!== 1"), "line 2: not a token in base64"),
        ("x.tiktoken", ranks("IQ== 0", "Ig== x"), "line 2: not a token in base64"),
        ("x.tiktoken", ranks("IQ== 0", "Ig== 1"), "254 of the 256 bytes are no token"),
    ],
)
def test_rejects_files_that_are_no_tokenizer(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"{name}.*{message}"):
        load(tmp_path / name)


def test_rejects_ranks_with_a_gap(tiktoken_file, tmp_path):
    text = tiktoken_file.read_text().splitlines()
    (tmp_path / "x.tiktoken").write_text("\n".join([*text[:-2], text[-1]]))
    with pytest.raises(ConfigError, match="its ranks are not 0 to 318"):
        load(tmp_path / "x.tiktoken")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["{", "[1]"])
def test_reports_an_invalid_tokenizer_config(name, text, bpe, tmp_path):
    shutil.copy(bpe / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        load(tmp_path)


@pytest.mark.parametrize("path", ["./no/such/folder/at.all", "/none.model", "no_such_name"])
def test_reports_a_path_that_does_not_exist(path):
    with pytest.raises(ConfigError, match=f"tokenizer_path={path} does not exist"):
        load(path)


def test_rejects_a_remote_path():
    with pytest.raises(ConfigError, match="'gs://bucket/tokenizer.model' .*is a remote path"):
        load("gs://bucket/tokenizer.model")


def test_reports_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no tokenizer: expected a tokenizer.json"):
        load(tmp_path)
    assert find_tokenizer([tmp_path / "config.json"]) is None


def test_downloads_from_the_hub(bpe, monkeypatch):
    import huggingface_hub

    requests = []

    def download(name, allow_patterns, token, **_):
        requests.append((name, "tokenizer.json" in allow_patterns, token))
        return str(bpe)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("someone/model-1.5", "hf_access_token=secret").vocab_size == 400
    assert requests == [("someone/model-1.5", True, "secret")]


def test_reports_a_failed_hub_download_without_the_token(monkeypatch):
    import huggingface_hub

    def download(name, **_):
        raise ConnectionError("no route; token secret")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ConfigError, match="someone/model is neither a local file.*ConnectionError.*folder and name"
    ) as caught:
        load("someone/model", "hf_access_token=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "package"), [("sentencepiece", "sentencepiece"), ("tiktoken", "tiktoken")]
)
def test_names_the_extra_of_a_missing_package(kind, package, paths, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtra, match=rf"needs the package '{package}'.*pip install -e .*\[text\]\""
    ):
        load(paths[kind])


def test_opens_a_published_tiktoken_encoding(monkeypatch, tiktoken_file):
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    encoding = tiktoken.Encoding(
        "o200k_base",
        pat_str=".",
        mergeable_ranks=load_tiktoken_bpe(str(tiktoken_file)),
        special_tokens={"<|endoftext|>": 400},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"o200k_base": encoding}.__getitem__)
    tokenizer = load("o200k_base")
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (400, 401)
    assert tokenizer.decode([400, 350, *tokenizer.encode("hi")]) == "\ufffdhi", "350 is no token"
    monkeypatch.setattr(tiktoken, "get_encoding", {}.__getitem__)
    with pytest.raises(
        ConfigError, match="tiktoken could not fetch o200k_base .*TIKTOKEN_CACHE_DIR"
    ):
        load("o200k_base", "tokenizer_type=tiktoken")


def test_warns_of_an_unknown_encoding_once(tiktoken_file, caplog, monkeypatch):
    import pickle

    monkeypatch.setattr(logging.getLogger("maxtext"), "propagate", True)
    tokenizer = open_tokenizer(str(tiktoken_file))
    pickle.loads(pickle.dumps(tokenizer))
    assert [record.message.endswith("reading it as Llama 3's") for record in caplog.records] == [
        True
    ]
