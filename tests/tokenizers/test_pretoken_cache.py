"""The pre-token cache gives the same ids as the library."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from maxtext.tokenizers.pretoken_cache import PretokenCache, supported_characters

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CASED = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}*{CASED[1]}+{CASED[2]}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}+{CASED[1]}*{CASED[2]}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt2": None, "llama3": LLAMA3, "o200k": O200K}


def train(pattern, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([__doc__, Path(__file__).read_text()], trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def texts(count, seed=0):
    """Runs of characters of random kinds, so that all pairs of kinds are adjacent somewhere."""
    generator = random.Random(seed)
    supported = supported_characters()
    kinds = [
        "abc",
        "XYZ",
        "019",
        " ",
        "  ",
        "\n",
        "\r",
        "\t",
        "'",
        "'s",
        "'LL",
        "'Ve",
        "/",
        ".,!?",
        "éüß",
        "ДЖя",
        "αΩ",
        "²½Ⅷ",
        "“”’–…",
        "\u00a0\u2003\u2028",
        "\x1c\x1f\x0b\x0c\x85",
        "ǅʰª",
        "</s>",
        "🙂→✓",
        supported,
        supported,
    ]
    for _ in range(count):
        runs = (
            generator.choices(generator.choice(kinds), k=generator.randint(1, 4)) for _ in range(40)
        )
        yield "".join(map("".join, runs))


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@pytest.mark.parametrize("name", PATTERNS)
def test_ids_equal_the_library(name, normalizer):
    tokenizer = train(PATTERNS[name], normalizer)
    cache = PretokenCache.from_tokenizer(tokenizer)
    samples = [__doc__, "", *texts(1500)]
    expected = tokenizer.encode_batch(samples, add_special_tokens=False)
    for sample, got, want in zip(samples, cache.encode_batch(samples), expected, strict=True):
        assert got is not None
        assert got.dtype == np.int32
        assert got.tolist() == want.ids, sample


def test_leaves_unsupported_texts_to_the_library():
    tokenizer = train(None)
    tokenizer.add_tokens(["<gap>"])
    cache = PretokenCache.from_tokenizer(tokenizer)
    unsupported = ["e\u0301", "漢字", "a <gap> b", "\u017f", "\ud800", "नमस्ते", "\ue000"]
    assert cache.encode_batch(unsupported) == [None] * len(unsupported)
    assert cache.encode_batch(["a < gap > b"])[0] is not None


def test_a_full_cache_is_cleared(monkeypatch):
    monkeypatch.setattr("maxtext.tokenizers.pretoken_cache.MAX_CHARS", 100)
    tokenizer = train(None)
    cache = PretokenCache.from_tokenizer(tokenizer)
    for text in texts(50):
        assert (
            cache.encode_batch([text])[0].tolist()
            == tokenizer.encode(text, add_special_tokens=False).ids
        )
        assert cache.num_chars < 400


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"normalizer": normalizers.Lowercase()},
        {"model": models.Unigram()},
        {"model": models.BPE(dropout=0.1)},
    ],
)
def test_is_none_for_tokenizers_without_independent_pretokens(change):
    tokenizer = train(None)
    for name, value in change.items():
        setattr(tokenizer, name, value)
    assert PretokenCache.from_tokenizer(tokenizer) is None


@pytest.mark.parametrize("pattern", [r"[a[b]]+|.", r"[a-z&&b]|.", r"(a)|.", r"\h+|.", r"\[+|."])
def test_is_none_for_patterns_without_an_equivalent_in_re(pattern):
    assert PretokenCache.from_tokenizer(train(pattern)) is None
