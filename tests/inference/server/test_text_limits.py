"""The end of a text is tokenized as the whole text is, by the `tokenizers` library itself."""

import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from maxtext.inference.server.request_parser import OVERLAP, check_text_length, encode_end
from maxtext.inference.validation import RequestError

WORDS = [
    "the",
    "end",
    "of",
    "a",
    "long",
    "text,",
    "12345",
    "ümläute",
    "日本語",
    "don't",
    "}{\n\n",
    "",
]
# The pattern of Llama 3 and Qwen.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(kind):
    trainer_options = {"vocab_size": 400, "show_progress": False}
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        trainer = trainers.BpeTrainer(
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **trainer_options
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            unk_token="<unk>", special_tokens=["<unk>"], **trainer_options
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(special_tokens=["<unk>"], **trainer_options)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    return tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "word_piece"])
def test_end_equals_the_end_of_the_whole_text(kind):
    tokenizer = build_tokenizer(kind)
    generator = random.Random(0)

    def encode(text):
        sizes.append(len(text))
        return tokenizer.encode(text).ids

    for count in (1, 7, 100):
        for _ in range(20):
            words = generator.choices(WORDS, k=generator.randint(1, 6000))
            text = generator.choice(["", " "]).join(words)
            sizes = []
            assert encode_end(text, count, encode, 20) == tokenizer.encode(text).ids[-count:]
            assert max(sizes) <= (count + OVERLAP) * 20 + 1024


def test_blank_text_that_has_too_few_tokens_is_refused():
    """A tokenizer that drops blanks could otherwise be made to read all of a text."""
    text = "word " * 1000 + " " * 10**6
    sizes = []

    def encode(part):
        sizes.append(len(part))
        return [1] * len(part.split())

    with pytest.raises(RequestError, match="truncate_prompt_tokens") as caught:
        encode_end(text, 5, encode, None)
    assert caught.value.param == "truncate_prompt_tokens"
    assert max(sizes) < 20_000


def test_text_that_may_fit_is_not_refused():
    check_text_length("x" * 320, 40, 8)
    check_text_length("x" * 40 * 256, 40, None)
    for size, token_chars in ((321, 8), (40 * 256 + 1, None)):
        with pytest.raises(RequestError, match="at least 41 tokens"):
            check_text_length("x" * size, 40, token_chars)
