"""Tokenizers by their name on the Hugging Face hub: downloaded once, then found in its cache, also
offline.
"""

import re
from pathlib import Path

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require

FILES = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "tokenizer.model", "spiece.model", "tiktoken.model", "*.tiktoken",
]  # fmt: skip


def is_hub_name(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def download(name: str, access_token: str | None) -> Path:
    """The folder with the tokenizer's files of a repository."""
    library = require("huggingface_hub", f"tokenizer_path={name}, a name on the Hugging Face hub,")
    try:
        return Path(library.snapshot_download(name, allow_patterns=FILES, token=access_token))
    except Exception as error:  # of the network, of the cache, of permissions: the library has many
        raise ConfigError(
            f"tokenizer_path={name} is neither a file nor a folder here, and the Hugging Face hub did not give it "
            f"({type(error).__name__}): check the name and the network, set hf_access_token if the model is gated, or "
            "download it and name its folder"
        ) from error
