"""The files that Hugging Face puts next to a vocabulary: special tokens and the chat template.

tokenizer_config.json, else special_tokens_map.json, names the special tokens. The chat template is
chat_template.jinja, else chat_template.json, else an entry of tokenizer_config.json.
"""

from pathlib import Path
from typing import Any

from maxtext.common.files import read_json_object


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json, overridden by tokenizer_config.json."""
    special_tokens_map = read_json(folder / "special_tokens_map.json")
    return special_tokens_map | read_json(folder / "tokenizer_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or an empty dict if the file does not exist."""
    return read_json_object(path) if path.exists() else {}


def special_token_texts(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token …, each of which is given as a string or as a record."""
    entries = {key: value for key, value in tokenizer_config.items() if key.endswith("_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in entries.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def read_chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The chat template of a tokenizer's folder, or None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return chat_template_entry(read_json(folder / "chat_template.json")) or chat_template_entry(
        tokenizer_config
    )


def chat_template_entry(record: dict[str, Any]) -> str | None:
    """The entry chat_template: a string, or a list of named templates, of which "default"."""
    template = record.get("chat_template")
    if isinstance(template, list):
        by_name = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = by_name.get("default")
    return template if isinstance(template, str) else None
