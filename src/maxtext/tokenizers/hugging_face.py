"""Tokenizers as Hugging Face ships them: tokenizer.json, read by the `tokenizers` library."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from maxtext.common.errors import UserError


class HuggingFaceTokenizer:
    def __init__(self, path: Path, settings: dict[str, Any]):
        from tokenizers import Tokenizer

        self.name = str(path)
        try:
            self.inner = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(f"{path} is not a tokenizer: {error}") from error
        self.bos_id, self.eos_id = self.special(settings.get("bos_token")), self.special(settings.get("eos_token"))
        pad = self.special(settings.get("pad_token"))
        self.pad_id = 0 if pad is None else pad
        self.vocab_size = max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def special(self, token: str | dict | None) -> int | None:
        """The id of a special token, which settings give as text or as a record."""
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self.inner.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """With the special tokens that a text starts with in this vocabulary."""
        return self.inner.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode([int(token) for token in ids], skip_special_tokens=True)


def find_tokenizer(files: Iterable[Path]) -> HuggingFaceTokenizer | None:
    """The tokenizer among the files that came with a model."""
    named = {file.name: file for file in files}
    if "tokenizer.json" not in named:
        return None
    settings = {}
    if "tokenizer_config.json" in named:
        settings = json.loads(named["tokenizer_config.json"].read_text(encoding="utf-8"))
    return HuggingFaceTokenizer(named["tokenizer.json"], settings)
