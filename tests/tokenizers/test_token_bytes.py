"""The bytes of tokens make up the text."""

import pytest

from maxtext.tokenizers import ByteTokenizer
from maxtext.tokenizers.hugging_face import HuggingFaceTokenizer
from maxtext.tokenizers.load import concatenates, text_bytes
from maxtext.tokenizers.sentence_piece import SentencePieceTokenizer
from maxtext.tokenizers.tiktoken_file import TiktokenTokenizer
from tests.tokenizers.tiny import write_byte_fallback

TEXT = 'Grüße, 世界 🦊 {"a": [1, 2]}  and\n\ttabs'


@pytest.fixture(scope="session")
def tokenizers(bpe, sentencepiece_file, tiktoken_file, tmp_path_factory):
    fallback = write_byte_fallback(tmp_path_factory.mktemp("fallback"))
    return {
        "byte": ByteTokenizer(),
        "byte level": HuggingFaceTokenizer(bpe / "tokenizer.json"),
        "byte fallback": HuggingFaceTokenizer(fallback / "tokenizer.json"),
        "sentencepiece": SentencePieceTokenizer(sentencepiece_file),
        "tiktoken": TiktokenTokenizer(tiktoken_file, quiet=True),
    }


@pytest.mark.parametrize(
    "kind", ["byte", "byte level", "byte fallback", "sentencepiece", "tiktoken"]
)
def test_bytes_make_up_the_text(tokenizers, kind):
    """Except for the space that some vocabularies put before a text. The SentencePiece model
    normalizes characters, so what it decodes is the reference.
    """
    tokenizer = tokenizers[kind]
    assert concatenates(tokenizer)
    ids = tokenizer.encode(TEXT)
    joined = b"".join(text_bytes(tokenizer, token) for token in ids)
    assert joined.decode().removeprefix(" ") == tokenizer.decode(ids)
    assert len(ids) > 20
    for token in (-1, tokenizer.vocab_size, *tokenizer.special_ids):
        assert text_bytes(tokenizer, token) == b""


def test_words_do_not_concatenate(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert not concatenates(HuggingFaceTokenizer(tmp_path / "tokenizer.json"))
