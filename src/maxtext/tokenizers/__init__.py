"""Level 2: text to token ids and back, behind one small interface."""

from maxtext.tokenizers.byte import ByteTokenizer
from maxtext.tokenizers.chat import ChatTemplate, chat_template
from maxtext.tokenizers.interface import Tokenizer
from maxtext.tokenizers.load import find_tokenizer, load_tokenizer, open_tokenizer

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "Tokenizer",
    "chat_template",
    "find_tokenizer",
    "load_tokenizer",
    "open_tokenizer",
]
