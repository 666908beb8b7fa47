"""Text that flows: characters are whole, what a stop may begin with is held back, and the pieces
make the whole.
"""

import numpy as np
import pytest

from maxtext.inference.text import Text
from maxtext.tokenizers import ByteTokenizer, open_tokenizer
from maxtext.tokenizers.boundaries import every_boundary
from tests.tokenizers.tiny import (
    write_bpe,
    write_byte_fallback,
    write_sentencepiece,
    write_tiktoken,
)

MULTIBYTE = "日本語のテキスト、数行。"
TEXTS = [
    MULTIBYTE, "the quick brown fox", "  two  spaces \t\n\n  x  ", "été 🙂👩‍👩‍👧 a\u0301 \ufffd end",
    " " * 30 + "x" + " " * 30, "a🙂b日c語d", "\n\n\n", "",
]  # fmt: skip
KINDS = ["byte", "byte-level", "byte-fallback", "sentencepiece", "tiktoken"]


class Pieces:
    """A vocabulary of given texts, joined as they are."""

    def __init__(self, *words):
        self.words = words

    def boundaries(self):
        return every_boundary()

    def decode(self, ids):
        return "".join(self.words[token] for token in ids)


class Spaced(Pieces):
    """As in many vocabularies, the space before a word is the word's, and the first of a text loses
    it.
    """

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


def flow(text, tokens, size=1):
    pieces = [text.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return [*pieces, text.add([], last=True)]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte": ByteTokenizer(),
        "byte-level": open_tokenizer(str(write_bpe(folder / "bpe"))),
        "byte-fallback": open_tokenizer(str(write_byte_fallback(folder / "byte_fallback"))),
        "sentencepiece": open_tokenizer(str(write_sentencepiece(folder / "tokenizer.model"))),
        "tiktoken": open_tokenizer(str(write_tiktoken(folder / "tiny.tiktoken"))),
    }


def random_splits(random, tokens):
    """The tokens in parts of 0 to 20, of which the last has none."""
    while tokens:
        size = int(random.integers(0, 21))
        yield tokens[:size]
        tokens = tokens[size:]
    yield []


def streamed(tokenizer, prompt, parts, stops=()):
    """The text that was emitted for the parts of the tokens, and the stream itself."""
    stream = Text(tokenizer, prompt, stops)
    parts = list(parts)
    pieces = [stream.add(part, last=number == len(parts) - 1) for number, part in enumerate(parts)]
    assert "".join(pieces) == stream.whole
    return stream.whole, stream


@pytest.mark.parametrize("size", [1, 2, 8, 9, 16, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_size_decode_as_the_whole(kind, size, tokenizers):
    tokenizer = tokenizers[kind]
    for prompt in ([], tokenizer.encode_prompt("x"), tokenizer.encode_prompt("語" * 12)):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            blocks = [ids[start : start + size] for start in range(0, len(ids), size)] or [[]]
            expected = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
            assert streamed(tokenizer, prompt, blocks)[0] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_random_ids_decode_as_the_whole(kind, tokenizers):
    """Invalid bytes, special tokens and ids outside the vocabulary, in random splits."""
    tokenizer = tokenizers[kind]
    random = np.random.default_rng(5)
    letters = [token for text in TEXTS for token in tokenizer.encode(text)]
    for number in range(150):
        ids = random.integers(0, tokenizer.vocab_size + 3, 60)
        if number % 3:
            ids = np.where(random.random(60) < 0.3, ids, random.choice(letters, 60))
        ids, prompt = ids.tolist(), tokenizer.encode_prompt(TEXTS[number % len(TEXTS)])
        assert streamed(tokenizer, [], random_splits(random, ids))[0] == tokenizer.decode(ids)
        text, _ = streamed(
            tokenizer, prompt, random_splits(random, [*tokenizer.encode(" a"), *ids])
        )
        whole = tokenizer.decode([*prompt, *tokenizer.encode(" a"), *ids])
        assert tokenizer.decode(prompt) + text == whole


@pytest.mark.parametrize("kind", ["byte", "byte-level", "tiktoken"])
def test_a_prompt_that_ends_inside_a_character(kind, tokenizers):
    """The character that the new tokens complete belongs to the new text."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("ab🙂cd")
    complete = (
        next(size for size in range(len(ids)) if "\ufffd" in tokenizer.decode(ids[:size])) - 1
    )
    for size in range(complete, len(ids)):
        text, _ = streamed(tokenizer, ids[:size], ([token] for token in ids[size:]))
        assert tokenizer.decode(ids[:size]).rstrip("\ufffd") + text == "ab🙂cd"


@pytest.mark.parametrize("kind", KINDS)
def test_stops_across_random_splits(kind, tokenizers):
    """The text ends before the stop text that is complete first, wherever the blocks are cut."""
    tokenizer = tokenizers[kind]
    random = np.random.default_rng(7)
    for _ in range(60):
        text = "".join(random.choice(["a", "b", "日", "🙂", " "], 40))
        stops = [
            "".join(random.choice(["a", "b", "日", " "], random.integers(1, 4))) for _ in range(3)
        ]
        ids, prompt = tokenizer.encode(text), tokenizer.encode_prompt("x")
        whole = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
        ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
        shown, stream = streamed(tokenizer, prompt, random_splits(random, ids), stops)
        assert stream.stopped == bool(ends)
        assert shown == (whole[: min(ends)[1]] if ends else whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a", " ", "語", "語 "])
def test_each_token_is_decoded_a_bounded_number_of_times(kind, text, tokenizers, monkeypatch):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text * 400)
    decoded = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    for prompt in ([], [1], tokenizer.encode("x")):
        decoded.clear()
        streamed(tokenizer, prompt, [*([token] for token in ids), []])
        assert sum(decoded) <= 20 * len(ids)


def test_a_character_of_several_tokens_comes_whole():
    tokenizer = ByteTokenizer()
    for size in (1, 2, 5):
        pieces = flow(Text(tokenizer, [], ()), tokenizer.encode("a€ß🙂z"), size)
        assert "".join(pieces) == "a€ß🙂z"
        assert not any("�" in piece for piece in pieces)
    assert flow(Text(tokenizer, [], ()), tokenizer.encode("a€"), 1) == ["a", "", "", "€", ""]


def test_a_character_that_never_ends_is_told_at_last():
    tokenizer = ByteTokenizer()
    assert "".join(flow(Text(tokenizer, [], ()), tokenizer.encode("a€")[:-1])) == "a�"


def test_a_word_keeps_the_space_that_its_place_gives_it():
    tokenizer = Spaced(" one", " two", " three")
    assert flow(Text(tokenizer, [0], ()), [1, 2]) == [" two", " three", ""]
    assert flow(Text(tokenizer, [], ()), [1, 2]) == ["two", " three", ""]


@pytest.mark.parametrize(
    ("stops", "pieces", "whole", "stopped"),
    [
        (("cd",), ["ab", "", "", "", "", ""], "ab", True),
        (("bx",), ["a", "bc", "de", "f", "g", ""], "abcdefg", False),
        (
            ("cde", "de"),
            ["ab", "", "", "", "", ""],
            "ab",
            True,
        ),  # both end together: the earlier begins
        (("ab",), ["", "", "", "", "", ""], "", True),
        (("g",), ["ab", "c", "de", "f", "", ""], "abcdef", True),
        (("gh",), ["ab", "c", "de", "f", "", "g"], "abcdefg", False),
        (("",), ["ab", "c", "de", "f", "g", ""], "abcdefg", False),
    ],
)
def test_stops(stops, pieces, whole, stopped):
    text = Text(Pieces("ab", "c", "de", "f", "g"), [], stops)
    assert flow(text, [0, 1, 2, 3, 4]) == pieces
    assert (text.whole, text.stopped) == (whole, stopped)


def test_random_texts_and_stops():
    """Against the definition: the text before the first place where a stop begins that is complete
    first.
    """
    random = np.random.default_rng(0)
    tokenizer = ByteTokenizer()
    for _ in range(200):
        letters = random.choice(list("ab€"), 12)
        text = "".join(letters)
        stops = [
            "".join(random.choice(list("ab€"), random.integers(1, 4)))
            for _ in range(random.integers(1, 3))
        ]
        ids = tokenizer.encode(text)
        shown = Text(tokenizer, [], stops)
        pieces = []
        for token in ids:
            pieces.append(shown.add([token]))
            if shown.stopped:
                break
        pieces.append(shown.add([], last=True))
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        expected = text
        if ends:
            first = min(ends)
            expected = text[: min(text.find(stop) for stop in stops if stop in text[:first])]
        assert "".join(pieces) == shown.whole == expected
