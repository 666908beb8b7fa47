"""Level 2: text to token ids and back, behind one small interface."""

from maxtext.tokenizers.byte import ByteTokenizer
from maxtext.tokenizers.interface import Tokenizer
from maxtext.tokenizers.load import load_tokenizer

__all__ = ["ByteTokenizer", "Tokenizer", "load_tokenizer"]
