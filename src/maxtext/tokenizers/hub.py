"""Tokenizers on the Hugging Face Hub: downloaded once, then read from its cache, also offline."""

import re
from pathlib import Path

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require

FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "*.tiktoken",
]


def is_hub_name(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def download(name: str, access_token: str | None) -> Path:
    """Download the tokenizer's files of a repository; return their folder."""
    library = require("huggingface_hub", f"tokenizer_path={name}, a name on the Hugging Face hub,")
    try:
        return Path(library.snapshot_download(name, allow_patterns=FILES, token=access_token))
    except Exception as error:  # network, cache, permissions: no common base class
        raise ConfigError(
            f"tokenizer_path={name} is neither a local file nor a folder, and the download from "
            f"the Hugging Face hub failed ({type(error).__name__}): check the name and the "
            "network, set hf_access_token if the model is gated, or download it and name its "
            "folder"
        ) from error
