"""Text that flows: characters are whole, what a stop may begin with is held back, and the pieces make the whole."""

import numpy as np
import pytest

from maxtext.inference.text import Text
from maxtext.tokenizers.byte import ByteTokenizer


class Pieces:
    """A vocabulary of given texts, joined as they are."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids):
        return "".join(self.words[token] for token in ids)


class Spaced(Pieces):
    """As in many vocabularies, the space before a word is the word's, and the first of a text loses it."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


def flow(text, tokens, size=1):
    pieces = [text.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return [*pieces, text.add([], last=True)]


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
        (("cde", "de"), ["ab", "", "", "", "", ""], "ab", True),  # both end together: the earlier begins
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
    """Against the definition: the text before the first place where a stop begins that is complete first."""
    random = np.random.default_rng(0)
    tokenizer = ByteTokenizer()
    for _ in range(200):
        letters = random.choice(list("ab€"), 12)
        text = "".join(letters)
        stops = ["".join(random.choice(list("ab€"), random.integers(1, 4))) for _ in range(random.integers(1, 3))]
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
