"""Words cut and remembered here have the ids that the library gives for the whole text."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from maxtext.tokenizers.words import known_characters, words_of

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CASED = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}*{CASED[1]}+{CASED[2]}|[^\r\n\p{{L}}\p{{N}}]?{CASED[0]}+{CASED[1]}*{CASED[2]}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt2": None, "llama3": LLAMA3, "o200k": O200K}


def trained(pattern, normalizer=None):
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
    """Runs of kinds of characters in any order, so that every two kinds meet."""
    generator = random.Random(seed)
    known = known_characters()
    kinds = [
        "abc", "XYZ", "019", " ", "  ", "\n", "\r", "\t", "'", "'s", "'LL", "'Ve", "/", ".,!?", "éüß", "ДЖя", "αΩ",
        "²½Ⅷ", "“”’–…", "\u00a0\u2003\u2028", "\x1c\x1f\x0b\x0c\x85", "ǅʰª", "</s>", "🙂→✓", known, known,
    ]  # fmt: skip
    for _ in range(count):
        runs = (
            generator.choices(generator.choice(kinds), k=generator.randint(1, 4)) for _ in range(40)
        )
        yield "".join(map("".join, runs))


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@pytest.mark.parametrize("name", PATTERNS)
def test_ids_are_those_of_the_library(name, normalizer):
    tokenizer = trained(PATTERNS[name], normalizer)
    words = words_of(tokenizer)
    samples = [__doc__, "", *texts(1500)]
    expected = tokenizer.encode_batch(samples, add_special_tokens=False)
    for sample, got, want in zip(samples, words.encode_batch(samples), expected, strict=True):
        assert got is not None
        assert got.dtype == np.int32
        assert got.tolist() == want.ids, sample


def test_strange_texts_are_left_to_the_library():
    tokenizer = trained(None)
    tokenizer.add_tokens(["<gap>"])
    words = words_of(tokenizer)
    left = ["e\u0301", "漢字", "a <gap> b", "\u017f", "\ud800", "नमस्ते", "\ue000"]
    assert words.encode_batch(left) == [None] * len(left)
    assert words.encode_batch(["a < gap > b"])[0] is not None


def test_a_full_memory_begins_anew(monkeypatch):
    monkeypatch.setattr("maxtext.tokenizers.words.MOST", 100)
    tokenizer = trained(None)
    words = words_of(tokenizer)
    for text in texts(50):
        assert (
            words.encode_batch([text])[0].tolist()
            == tokenizer.encode(text, add_special_tokens=False).ids
        )
        assert words.size < 400


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
def test_tokenizers_that_need_the_whole_text(change):
    tokenizer = trained(None)
    for name, value in change.items():
        setattr(tokenizer, name, value)
    assert words_of(tokenizer) is None


@pytest.mark.parametrize("pattern", [r"[a[b]]+|.", r"[a-z&&b]|.", r"(a)|.", r"\h+|.", r"\[+|."])
def test_patterns_that_mean_something_else_to_re(pattern):
    assert words_of(trained(pattern)) is None
