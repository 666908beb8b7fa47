"""The files that Hugging Face puts beside a vocabulary: which tokens are special, and the chat
template.

tokenizer_config.json, else special_tokens_map.json, names the special tokens. The chat template is
chat_template.jinja, else chat_template.json, else an entry of tokenizer_config.json.
"""

from pathlib import Path
from typing import Any

from maxtext.common.files import read_json_object


def read_settings(folder: Path) -> dict[str, Any]:
    return read_json(folder / "special_tokens_map.json") | read_json(
        folder / "tokenizer_config.json"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is no such file."""
    return read_json_object(path) if path.exists() else {}


def special_texts(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, which settings give as text or as a record."""
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def own_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    return template_text(read_json(folder / "chat_template.json")) or template_text(settings)


def template_text(settings: dict[str, Any]) -> str | None:
    """The entry chat_template: text, or a list of named texts of which "default" is meant."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {
            entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)
        }
        found = named.get("default")
    return found if isinstance(found, str) else None
