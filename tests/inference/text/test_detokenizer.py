"""Incremental detokenization: deltas have complete characters, hold back what may begin a stop
text, and make up the decoded text.
"""

import numpy as np
import pytest

from maxtext.inference.requests import GenerationRequest, ReasoningSpan
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.text.detokenizer import Detokenizer
from maxtext.inference.text.session import visible_token_ids
from maxtext.tokenizers import ByteTokenizer, open_tokenizer
from maxtext.tokenizers.interface import every_boundary
from maxtext.tokenizers.load import text_bytes
from tests.tokenizers.tiny import (
    write_bpe,
    write_byte_fallback,
    write_sentencepiece,
    write_tiktoken,
)

MULTIBYTE = "日本語のテキスト、数行。"
TEXTS = [
    MULTIBYTE,
    "the quick brown fox",
    "  two  spaces \t\n\n  x  ",
    "été 🙂👩‍👩‍👧 a\u0301 \ufffd end",
    " " * 30 + "x" + " " * 30,
    "a🙂b日c語d",
    "\n\n\n",
    "",
]
KINDS = ["byte", "byte-level", "byte-fallback", "sentencepiece", "tiktoken"]


class FixedVocabulary:
    """A vocabulary of given texts, concatenated without changes."""

    def __init__(self, *words):
        self.words = words

    def boundary_detector(self):
        return every_boundary()

    def decode(self, ids):
        return "".join(self.words[token] for token in ids)


class SpaceDroppingVocabulary(FixedVocabulary):
    """As in many vocabularies, a word includes the space before it, and the first word of a text
    loses it.
    """

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


def deltas_of(detokenizer, tokens, size=1):
    """The text deltas of tokens that come `size` at a time."""
    starts = range(0, len(tokens), size)
    deltas = [detokenizer.add(tokens[start : start + size]) for start in starts]
    return [*deltas, detokenizer.add([], last=True)]


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
    """The tokens in steps of 0 to 20, of which the last has none."""
    while tokens:
        size = int(random.integers(0, 21))
        yield tokens[:size]
        tokens = tokens[size:]
    yield []


def detokenize(tokenizer, prompt, steps, stops=()):
    """The text that was emitted for the tokens of some steps, and the detokenizer."""
    detokenizer = Detokenizer(tokenizer, prompt, stops)
    steps = list(steps)
    deltas = [
        detokenizer.add(tokens, last=index == len(steps) - 1) for index, tokens in enumerate(steps)
    ]
    assert "".join(deltas) == detokenizer.text
    return detokenizer.text, detokenizer


@pytest.mark.parametrize("size", [1, 2, 8, 9, 16, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_any_size_make_up_the_decoded_text(kind, size, tokenizers):
    tokenizer = tokenizers[kind]
    for prompt in ([], tokenizer.encode_prompt("x"), tokenizer.encode_prompt("語" * 12)):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            steps = [ids[start : start + size] for start in range(0, len(ids), size)] or [[]]
            expected = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
            assert detokenize(tokenizer, prompt, steps)[0] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_random_ids_make_up_the_decoded_text(kind, tokenizers):
    """Invalid bytes, special tokens and ids outside the vocabulary, in random splits."""
    tokenizer = tokenizers[kind]
    random = np.random.default_rng(5)
    letters = [token for text in TEXTS for token in tokenizer.encode(text)]
    for number in range(150):
        ids = random.integers(0, tokenizer.vocab_size + 3, 60)
        if number % 3:
            ids = np.where(random.random(60) < 0.3, ids, random.choice(letters, 60))
        ids, prompt = ids.tolist(), tokenizer.encode_prompt(TEXTS[number % len(TEXTS)])
        assert detokenize(tokenizer, [], random_splits(random, ids))[0] == tokenizer.decode(ids)
        text, _ = detokenize(
            tokenizer, prompt, random_splits(random, [*tokenizer.encode(" a"), *ids])
        )
        expected = tokenizer.decode([*prompt, *tokenizer.encode(" a"), *ids])
        assert tokenizer.decode(prompt) + text == expected


@pytest.mark.parametrize("kind", ["byte", "byte-level", "tiktoken"])
def test_prompt_that_ends_inside_a_character(kind, tokenizers):
    """The character that the new tokens complete belongs to the new text."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("ab🙂cd")
    complete = (
        next(size for size in range(len(ids)) if "\ufffd" in tokenizer.decode(ids[:size])) - 1
    )
    for size in range(complete, len(ids)):
        text, _ = detokenize(tokenizer, ids[:size], ([token] for token in ids[size:]))
        assert tokenizer.decode(ids[:size]).rstrip("\ufffd") + text == "ab🙂cd"


def new_text(tokenizer, prompt, tokens):
    """The text of tokens after a prompt, as vLLM's incremental detokenization defines it: what
    follows the text of the prompt. A character that the tokens complete is new.
    """
    prompt_text, text = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    size = len(prompt_text)
    while not text.startswith(prompt_text[:size]):
        size -= 1
    return text[size:]


@pytest.mark.parametrize("kind", ["byte", "byte-level", "byte-fallback", "tiktoken"])
def test_text_does_not_begin_with_bytes_of_the_prompt(kind, tokenizers):
    """Prompts that end in the first byte of a character, once or many times."""
    tokenizer = tokenizers[kind]
    hello, word = tokenizer.encode("Hello "), tokenizer.encode("ab")
    smile = tokenizer.encode("\U0001f642")
    while text_bytes(tokenizer, smile[0])[:1] != b"\xf0":
        smile = smile[1:]
    lead = smile[0]
    for count in (1, 2, 7, 8, 9, 40, 70):
        prompt = [*hello, *[lead] * count]
        for tokens in ([], word, [*smile, *word], [*smile[1:], *word], [lead], [lead, *word]):
            expected = new_text(tokenizer, prompt, tokens)
            for steps in ([tokens], [*([token] for token in tokens), []]):
                assert detokenize(tokenizer, prompt, steps)[0] == expected
        assert detokenize(tokenizer, prompt, [word])[0].strip() == "ab"
        # Neither does a stop text match in the prompt.
        text, detokenizer = detokenize(tokenizer, prompt, [word], stops=["\ufffd"])
        assert (text.strip(), detokenizer.stopped) == ("ab", False)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_texts_across_random_splits(kind, tokenizers):
    """The text ends before the stop string that is complete first, wherever the steps are split."""
    tokenizer = tokenizers[kind]
    random = np.random.default_rng(7)
    for _ in range(60):
        text = "".join(random.choice(["a", "b", "日", "🙂", " "], 40))
        stops = [
            "".join(random.choice(["a", "b", "日", " "], random.integers(1, 4))) for _ in range(3)
        ]
        ids, prompt = tokenizer.encode(text), tokenizer.encode_prompt("x")
        decoded = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
        ends = [
            (decoded.find(stop) + len(stop), decoded.find(stop))
            for stop in stops
            if stop in decoded
        ]
        shown, detokenizer = detokenize(tokenizer, prompt, random_splits(random, ids), stops)
        assert detokenizer.stopped == bool(ends)
        assert shown == (decoded[: min(ends)[1]] if ends else decoded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a", " ", "語", "語 "])
def test_every_token_is_decoded_a_bounded_number_of_times(kind, text, tokenizers, monkeypatch):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text * 400)
    decoded = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    for prompt in ([], [1], tokenizer.encode("x")):
        decoded.clear()
        detokenize(tokenizer, prompt, [*([token] for token in ids), []])
        assert sum(decoded) <= 20 * len(ids)


def test_character_of_several_tokens_is_emitted_complete():
    tokenizer = ByteTokenizer()
    for size in (1, 2, 5):
        deltas = deltas_of(Detokenizer(tokenizer, [], ()), tokenizer.encode("a€ß🙂z"), size)
        assert "".join(deltas) == "a€ß🙂z"
        assert not any("�" in delta for delta in deltas)
    assert deltas_of(Detokenizer(tokenizer, [], ()), tokenizer.encode("a€"), 1) == [
        "a",
        "",
        "",
        "€",
        "",
    ]


def test_incomplete_character_is_emitted_at_the_end():
    tokenizer = ByteTokenizer()
    deltas = deltas_of(Detokenizer(tokenizer, [], ()), tokenizer.encode("a€")[:-1])
    assert "".join(deltas) == "a�"


def test_word_keeps_its_leading_space_unless_it_is_the_first():
    tokenizer = SpaceDroppingVocabulary(" one", " two", " three")
    assert deltas_of(Detokenizer(tokenizer, [0], ()), [1, 2]) == [" two", " three", ""]
    assert deltas_of(Detokenizer(tokenizer, [], ()), [1, 2]) == ["two", " three", ""]


@pytest.mark.parametrize(
    ("stops", "deltas", "text", "stopped"),
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
def test_stop_texts(stops, deltas, text, stopped):
    detokenizer = Detokenizer(FixedVocabulary("ab", "c", "de", "f", "g"), [], stops)
    assert deltas_of(detokenizer, [0, 1, 2, 3, 4]) == deltas
    assert (detokenizer.text, detokenizer.stopped) == (text, stopped)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("start", "text", "shown"),
    [
        ("<", "<a stop b>c stop d", "<a stop b>c "),
        ("<", " <a stop b>c", " <a stop b>c"),
        ("<", "a stop <b>", "a "),
        ("<", "stop", ""),
        ("", "a stop b>c stop", "a stop b>c "),
        ("", "a stop", "a stop"),
    ],
)
def test_stop_texts_have_no_effect_in_reasoning(start, text, shown, size):
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, [], ["stop"], reasoning=ReasoningSpan(start, ">"))
    ids = tokenizer.encode(text)
    deltas = [detokenizer.add(ids[index : index + size]) for index in range(0, len(ids), size)]
    deltas.append(detokenizer.add([], last=True))
    assert "".join(deltas) == detokenizer.text == shown


@pytest.mark.parametrize("kind", ["byte-level", "tiktoken"])
def test_visible_special_tokens_are_part_of_the_text(kind, tokenizers):
    tokenizer = tokenizers[kind]
    special = max(tokenizer.special_ids)
    name = tokenizer.id_to_token(special)
    ids = [*tokenizer.encode("a€"), special, *tokenizer.encode(" b"), special]
    for visible, expected in ((frozenset(), "a€ b"), ({special}, f"a€{name} b{name}")):
        detokenizer = Detokenizer(tokenizer, [], (), visible_ids=frozenset(visible))
        for token in ids:
            detokenizer.add([token])
        detokenizer.add([], last=True)
        assert detokenizer.text == expected


def test_special_tokens_that_a_request_shows(tokenizers):
    tokenizer = tokenizers["byte-level"]
    for skips, expected in ((True, frozenset()), (False, tokenizer.special_ids)):
        request = GenerationRequest("x", SamplingParams(skip_special_tokens=skips))
        assert visible_token_ids(request, tokenizer) == expected


def test_random_texts_and_stops():
    """Against the definition: the text before the stop string that is complete first."""
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
        detokenizer = Detokenizer(tokenizer, [], stops)
        deltas = []
        for token in ids:
            deltas.append(detokenizer.add([token]))
            if detokenizer.stopped:
                break
        deltas.append(detokenizer.add([], last=True))
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        expected = text
        if ends:
            first = min(ends)
            expected = text[: min(text.find(stop) for stop in stops if stop in text[:first])]
        assert "".join(deltas) == detokenizer.text == expected
