"""Tokenizers on the Hugging Face Hub."""

from pathlib import Path

from maxtext.common import hub

FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    f"{hub.CHAT_TEMPLATES_DIR}/*.jinja",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "*.tiktoken",
]


def download(name: str, access_token: str | None) -> Path:
    """The folder with the tokenizer's files of a repository. Raises ConfigError if they are neither
    in the cache nor can be downloaded.
    """
    prefix = f"tokenizer_path={name} is neither a local file nor a folder, and "
    return hub.download(name, FILES, access_token, prefix)
