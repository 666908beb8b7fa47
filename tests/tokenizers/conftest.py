"""One tokenizer of each kind, trained once."""

import pytest

from tests.tokenizers.tiny import write_bpe, write_sentencepiece, write_tiktoken


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    return write_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory):
    return write_sentencepiece(tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model")


@pytest.fixture(scope="session")
def tiktoken_file(tmp_path_factory):
    return write_tiktoken(tmp_path_factory.mktemp("tiktoken") / "tiny.tiktoken")


@pytest.fixture(scope="session")
def paths(bpe, sentencepiece_file, tiktoken_file):
    return {
        "huggingface": str(bpe),
        "sentencepiece": str(sentencepiece_file),
        "tiktoken": str(tiktoken_file),
        "byte": "byte",
    }
