"""The interface of all tokenizers, and the parts that several of them share.

`Tokenizer.encode` adds no special tokens; the input pipeline does. Any str can be encoded and any
ids can be decoded without an error. A tokenizer is thread-safe. It can be pickled, and is then
opened again from its file in the other process.

A `BoundaryDetector` finds where a sequence of ids can be split without breaking a character, for
incremental detokenization. It is called with each id of a sequence in turn, and returns True if the
text of the ids so far is final: no later id can change it. A detector has state, so each sequence
has its own.

`read_tokenizer_config` and `read_chat_template` read the files that Hugging Face puts next to a
vocabulary. tokenizer_config.json, else special_tokens_map.json, names the special tokens. Chat
templates are looked up as by transformers' AutoTokenizer: chat_template.jinja and
additional_chat_templates/*.jinja, else an entry of tokenizer_config.json, which is a template or a
list of templates with names. If there is none, chat_template.json of older processors has one.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from maxtext.common.files import read_json_object
from maxtext.common.hub import CHAT_TEMPLATES_DIR
from maxtext.common.types import Json

ChatTemplateSource = str | Mapping[str, str] | None  # one template, or several by name


def read_tokenizer_config(folder: Path) -> Json:
    """special_tokens_map.json, overridden by tokenizer_config.json."""
    special_tokens_map = read_json(folder / "special_tokens_map.json")
    return special_tokens_map | read_json(folder / "tokenizer_config.json")


def read_json(path: Path) -> Json:
    """The JSON object in a file, or an empty dict if the file does not exist."""
    return read_json_object(path) if path.exists() else {}


def special_token_texts(tokenizer_config: Json) -> dict[str, str]:
    """The texts of bos_token, eos_token …, each of which is given as a string or as a record."""
    entries = {key: value for key, value in tokenizer_config.items() if key.endswith("_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in entries.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def read_chat_template(folder: Path, tokenizer_config: Json) -> ChatTemplateSource:
    """The chat template of a tokenizer's folder, or templates by name, or None."""
    templates = {}
    default = folder / "chat_template.jinja"
    if default.is_file():
        templates["default"] = read_jinja(default)
    for path in sorted((folder / CHAT_TEMPLATES_DIR).glob("*.jinja")):
        templates[path.name.removesuffix(".jinja")] = read_jinja(path)
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    template = chat_template_entry(tokenizer_config)
    if template is None:
        return chat_template_entry(read_json(folder / "chat_template.json"))
    return template


def read_jinja(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def chat_template_entry(record: Json) -> ChatTemplateSource:
    """The entry chat_template: a string, or templates with names as a list or an object."""
    template = record.get("chat_template")
    if isinstance(template, str):
        return template
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in entries}
    if not isinstance(template, dict):
        return None
    named = {
        name: source
        for name, source in template.items()
        if isinstance(name, str) and isinstance(source, str)
    }
    return named or None


BoundaryDetector = Callable[[int], bool]

# A byte that is never part of UTF-8: an id without bytes ends the character before it.
ENDS_CHARACTER = b"\xff"


def utf8_boundaries(token_bytes: Callable[[int], bytes]) -> BoundaryDetector:
    """For vocabularies of bytes: a boundary is where no UTF-8 character is incomplete.

    `token_bytes` returns the bytes of an id: empty for ids that decoding skips, `ENDS_CHARACTER`
    for ids that decode to something else than bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def is_boundary(token: int) -> bool:
        decoder.decode(token_bytes(token))
        incomplete_bytes, _ = decoder.getstate()
        return not incomplete_bytes

    return is_boundary


def byte_run_boundaries(
    is_byte: Callable[[int], bool], is_skipped: Callable[[int], bool]
) -> BoundaryDetector:
    """For decoders that validate a run of byte tokens at once: a boundary is where no run is open.

    The `ByteFallback` decoder of Hugging Face replaces every byte of a run, valid characters too,
    if any of them is invalid. `is_skipped`: ids that decoding removes before it looks for runs.
    """
    open_run = False

    def is_boundary(token: int) -> bool:
        nonlocal open_run
        if not is_skipped(token):
            open_run = is_byte(token)
        return not open_run

    return is_boundary


def every_boundary() -> BoundaryDetector:
    """For vocabularies whose tokens are whole characters."""
    return lambda token: True


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """byte, sentencepiece, huggingface or tiktoken."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""

    @property
    def bos_id(self) -> int | None:
        """Beginning of a sequence; None, like `eos_id`, if the vocabulary has no such token."""

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which no ordinary text contains and `decode` skips."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of bos_token, eos_token …, as chat templates use them."""

    @property
    def chat_template(self) -> ChatTemplateSource:
        """The template that came with the vocabulary, as Jinja text; if there are several, by
        name.
        """

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[np.ndarray]:
        """The ids of each text as int32, computed on all cores: as by `encode`, or with `specials`
        as by `encode_with_specials`. The arrays may be read-only.
        """

    def encode_with_specials(self, text: str) -> list[int]:
        """Like `encode`, but the text of a special token, as in the output of a chat template,
        becomes that token.
        """

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode_with_specials`, and the (start, end) in `text` of the characters that
        each comes from. Tokens that are parts of one character have equal offsets.
        """

    def encode_prompt(self, text: str) -> list[int]:
        """Like `encode_with_specials`, after the special tokens that start a text in this
        vocabulary.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids without special tokens; incomplete characters become U+FFFD."""

    def boundary_detector(self) -> BoundaryDetector:
        """A new detector of the positions where a sequence of ids can be split for decoding: there,
        `decode` of the ids before is a prefix of `decode` of all.
        """

    def id_to_token(self, token: int) -> str:
        """A token as its vocabulary writes it."""
