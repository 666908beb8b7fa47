"""The byte tokenizer against UTF-8 itself, and the checks at loading."""

import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.load import base_values
from maxtext.tokenizers import ByteTokenizer, load_tokenizer

TEXTS = ["", "abc", "línea\r\nnächste\ttab\0", "日本語", "👩‍👩‍👧‍👦 🇫🇷 e\u0301"]


def load(**update):
    return load_tokenizer(base_values().model_copy(update=update))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("specials", [True, False])
def test_round_trip(text, specials):
    tokenizer = ByteTokenizer(specials)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_the_bytes_of_utf8():
    assert ByteTokenizer().encode("aé") == [97 + 3, 0xC3 + 3, 0xA9 + 3]
    assert ByteTokenizer(specials=False).encode("aé") == [97, 0xC3, 0xA9]
    assert all(type(token) is int for token in ByteTokenizer().encode("a"))


def test_special_tokens_are_outside_the_bytes():
    tokenizer = load(vocab_size=259)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (
        0,
        1,
        2,
        259,
    )
    assert tokenizer.encode("\0") == [3]
    assert max(range(256), key=lambda byte: byte + 3) + 3 == tokenizer.vocab_size - 1


def test_decode_skips_special_tokens():
    assert ByteTokenizer().decode([1, 100, 0, 101, 2, 0, 0]) == "ab"


def test_a_vocabulary_of_256_is_plain_bytes():
    tokenizer = load(vocab_size=256)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (
        0,
        None,
        None,
        256,
    )
    assert tokenizer.decode(range(128)) == bytes(range(128)).decode()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_incomplete_characters_decode_to_the_replacement_character(cut):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("a🙂")[: 1 + cut]) == "a\ufffd"


def test_unknown_ids_do_not_raise():
    assert ByteTokenizer().decode([100, 5000, 101, -7]) == "a\ufffdb\ufffd"


def test_a_lone_surrogate_does_not_raise():
    assert ByteTokenizer().decode(ByteTokenizer().encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize("path", [None, "", " ", "byte", "BYTE", "Byte"])
def test_an_empty_path_selects_the_byte_tokenizer(path):
    assert load(tokenizer_path=path, vocab_size=32000).name == "byte"


@pytest.mark.parametrize("vocab_size", [1, 255, 257, 258])
def test_rejects_a_vocab_size_that_is_too_small(vocab_size):
    with pytest.raises(ConfigError, match=rf"has 259 ids, but vocab_size={vocab_size}\b"):
        load(tokenizer_path="byte", vocab_size=vocab_size)
