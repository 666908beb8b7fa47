"""Each kind of tokenizer against its library, and the contract of the interface."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from maxtext.tokenizers import open_tokenizer

KINDS = ["huggingface", "sentencepiece", "tiktoken", "byte"]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces \t\n\n  x  ",
    "don't 1234567 THE end\r\n",
    "日本語 🙂 e\u0301 \u3000",
    "a\0b\x7f\ufeff",
    "<s>not special</s> <|im_start|> <|begin_of_text|> <sep>",
    "the quick brown fox " * 200,
]
BROKEN = ["a\ud800b", "\udfff", "\ud83d\ude42"]


@pytest.fixture(params=KINDS)
def tokenizer(request, paths):
    tokenizer = open_tokenizer(paths[request.param])
    assert tokenizer.kind == request.param
    return tokenizer


def library_encode(kind, path, text):
    """Ids by the library alone, special tokens as plain text."""
    if kind == "huggingface":
        from tokenizers import Tokenizer

        inner = Tokenizer.from_file(f"{path}/tokenizer.json")
        inner.encode_special_tokens = True
        return inner.encode(text, add_special_tokens=False).ids
    if kind == "sentencepiece":
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_file=path).encode(text)
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    # the pattern of Llama 3's reference code
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    inner = tiktoken.Encoding(
        "tiny", pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(path), special_tokens={}
    )
    return inner.encode_ordinary(text)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_library(kind, text, paths):
    assert open_tokenizer(paths[kind]).encode(text) == library_encode(kind, paths[kind], text)


def test_encode_batch_equals_encode(tokenizer):
    texts = [*TEXTS, *BROKEN] * 5
    for specials, encode in ((False, tokenizer.encode), (True, tokenizer.encode_with_specials)):
        batch = tokenizer.encode_batch(texts, specials)
        assert [ids.tolist() for ids in batch] == [encode(text) for text in texts]
        assert all(ids.dtype == np.int32 and ids.ndim == 1 for ids in batch)
    assert tokenizer.encode_batch([]) == []
    assert [ids.tolist() for ids in tokenizer.encode_batch([""])] == [[]]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_encodes_very_long_runs(tokenizer):
    for run in (" " * 1_000_000, "a" * 200_000):
        assert tokenizer.decode(tokenizer.encode(run + "x")) == run + "x"


def test_encodes_invalid_unicode(tokenizer):
    assert [tokenizer.decode(tokenizer.encode(text)) for text in BROKEN] == ["a?b", "?", "??"]


def test_decodes_any_ids(tokenizer):
    end = tokenizer.vocab_size
    for ids in (
        [end],
        [-1],
        [2**40],
        [2**31 - 1, 0],
        [-(2**70)],
        range(end),
        np.arange(end)[::-1],
        np.array([], int),
    ):
        assert isinstance(tokenizer.decode(ids), str)
    assert tokenizer.decode([*tokenizer.encode("ab"), end, *tokenizer.encode("c")]) == "ab\ufffdc"
    ids = tokenizer.encode("🙂")
    assert all(isinstance(tokenizer.decode(ids[:cut]), str) for cut in range(len(ids)))


def test_vocab_size_bounds_every_id(tokenizer):
    used = {token for ids in tokenizer.encode_batch(TEXTS, specials=True) for token in ids.tolist()}
    special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    assert 0 <= min(used | special) <= max(used | special) < tokenizer.vocab_size
    assert isinstance(tokenizer.id_to_token(tokenizer.vocab_size - 1), str)


def test_decode_skips_special_tokens(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode("some text"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "some text"


def test_is_thread_safe(tokenizer):
    texts = TEXTS * 20
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(tokenizer.encode_with_specials, texts))
    assert ids == [tokenizer.encode_with_specials(text) for text in TEXTS] * 20


def test_pickle_reopens_the_file(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert len(pickle.dumps(tokenizer)) < 1000, "the vocabulary is not pickled"
    for text in TEXTS:
        assert copy.encode(text) == tokenizer.encode(text)
        assert copy.encode_with_specials(text) == tokenizer.encode_with_specials(text)
    attributes = (
        "name",
        "vocab_size",
        "bos_id",
        "eos_id",
        "pad_id",
        "special_tokens",
        "chat_template",
    )
    assert [getattr(copy, name) for name in attributes] == [
        getattr(tokenizer, name) for name in attributes
    ]


@pytest.mark.slow
def test_unpickles_in_another_process_and_folder(paths, tmp_path, monkeypatch):
    """Even when they were opened by a relative path."""
    import os

    opened = [
        open_tokenizer(path if path == "byte" else os.path.relpath(path)) for path in paths.values()
    ]
    (tmp_path / "pickled").write_bytes(pickle.dumps(opened))
    code = (
        "import pickle; print([t.encode('<s> the fox') for t in pickle.load(open('pickled', "
        "'rb'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str([tokenizer.encode("<s> the fox") for tokenizer in opened])
    assert not result.stderr


def test_hugging_face_special_tokens(bpe):
    tokenizer = open_tokenizer(str(bpe))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    hello = tokenizer.encode("hello")
    assert tokenizer.encode_with_specials("<|im_start|>hello</s>") == [3, *hello, 2]
    assert tokenizer.encode_prompt("hello<|im_end|>") == [1, *hello, 4]
    assert not {1, 2, 3, 4} & set(tokenizer.encode("<s><|im_start|>hello</s>"))


def test_sentencepiece_special_tokens(sentencepiece_file):
    tokenizer = open_tokenizer(str(sentencepiece_file))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    hello = tokenizer.encode("hello")
    assert tokenizer.encode_with_specials("<s>hello<sep>hello<sep>></s>") == [
        1,
        *hello,
        3,
        *hello,
        4,
        2,
    ]
    assert tokenizer.encode_prompt("hello") == [1, *hello]
    assert not {1, 2, 3, 4} & set(tokenizer.encode("<s>hello<sep></s>"))
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


def test_tiktoken_special_tokens(tiktoken_file):
    tokenizer = open_tokenizer(str(tiktoken_file))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (
        320,
        321,
        324,
        576,
    )
    hello = tokenizer.encode("hello")
    chat = "<|start_header_id|>hello<|eot_id|><|reserved_special_token_247|>"
    assert tokenizer.encode_with_specials(chat) == [326, *hello, 329, 575]
    assert tokenizer.encode_prompt("hello") == [320, *hello]
    assert max(tokenizer.encode(chat)) < 320
