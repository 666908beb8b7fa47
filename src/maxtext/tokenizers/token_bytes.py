"""The bytes that each token adds to a text."""

from maxtext.tokenizers.boundaries import ENDS_CHARACTER
from maxtext.tokenizers.byte import ByteTokenizer
from maxtext.tokenizers.hugging_face import HuggingFaceTokenizer
from maxtext.tokenizers.interface import Tokenizer
from maxtext.tokenizers.sentence_piece import SentencePieceTokenizer
from maxtext.tokenizers.tiktoken_file import TiktokenTokenizer

SPACE = "▁"  # stands for a space in SentencePiece vocabularies


def concatenates(tokenizer: Tokenizer) -> bool:
    """Whether the text of a sequence is the concatenation of `text_bytes` of its tokens, except for
    spaces at its beginning.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return True
    steps = {"ByteLevel", "ByteFallback", "Metaspace"}
    return bool(steps.intersection(tokenizer.decoder_steps))


def text_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token adds to a text: none for special tokens and ids without a token. A
    token may be a part of a UTF-8 character.
    """
    if token in tokenizer.special_ids or not 0 <= token < tokenizer.vocab_size:
        return b""
    if isinstance(tokenizer, SentencePieceTokenizer):
        if tokenizer.inner.is_byte(token):
            return tokenizer.token_bytes(token)
        is_text = not tokenizer.inner.is_unknown(token) and not tokenizer.inner.is_unused(token)
        return tokenizer.id_to_token(token).replace(SPACE, " ").encode() if is_text else b""
    if isinstance(tokenizer, ByteTokenizer | TiktokenTokenizer):
        data = tokenizer.token_bytes(token)
        return b"" if data == ENDS_CHARACTER else data
    if isinstance(tokenizer, HuggingFaceTokenizer) and token in tokenizer.token_ids:
        if "ByteLevel" in tokenizer.decoder_steps:
            return tokenizer.token_bytes(token)
        text = tokenizer.id_to_token(token)
        if tokenizer.is_byte(token):
            return bytes.fromhex(text[len("<0x") : -1])
        return text.replace(SPACE, " ").encode()
    return b""
