"""The files that Hugging Face puts next to a vocabulary: special tokens and the chat template.

tokenizer_config.json, else special_tokens_map.json, names the special tokens. Chat templates are
found as by transformers' AutoTokenizer: chat_template.jinja and additional_chat_templates/*.jinja,
else an entry of tokenizer_config.json, which is a template or a list of templates with names. If
there is none, chat_template.json of older processors has one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxtext.common.files import read_json_object
from maxtext.common.hub import CHAT_TEMPLATES_DIR

ChatTemplateSource = str | Mapping[str, str] | None  # one template, or several by name


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


def read_chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> ChatTemplateSource:
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


def chat_template_entry(record: dict[str, Any]) -> ChatTemplateSource:
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
