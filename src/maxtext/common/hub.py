"""Names on the Hugging Face Hub in place of folders: `org/name` or `org/name@revision`. Files are
downloaded once, then read from the cache, also offline.

The token is that of the environment (HF_TOKEN), or of `hf auth login`, unless one is given. No
message contains it.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.common.files import local_path

NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
# What models and their tokenizers are read from; `download` leaves out folders of other formats.
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.jinja")
CHAT_TEMPLATES_DIR = "additional_chat_templates"  # the folder of a model's named chat templates


def is_hub_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


def find_folder(path: str | os.PathLike, access_token: str | None = None) -> Path:
    """The local folder at a path, whether it exists or not; if it does not and the path is the name
    of a model on the Hub, the folder of that model in the cache, after a download if necessary.
    Raises ConfigError if the model is neither in the cache nor can be downloaded.
    """
    folder = local_path(path)
    name = os.fspath(path)
    if folder.exists() or not is_hub_name(name):
        return folder
    return download(name, MODEL_FILES, access_token, f"there is no folder {name}, and ")


def model_name(path: str) -> str:
    """The name of a model: the name of its folder, or on the Hub the part after the slash."""
    match = NAME.fullmatch(path)
    if match is not None and not local_path(path).exists():
        return match[1].rpartition("/")[2]
    return local_path(path).resolve().name


def download(name: str, patterns: Sequence[str], access_token: str | None, prefix: str) -> Path:
    """The folder of a repository with the files that match `patterns`. Raises ConfigError, whose
    message starts with `prefix`.
    """
    match = NAME.fullmatch(name)
    assert match is not None, name
    repository, revision = match.groups()
    library = require("huggingface_hub", f"{name}, a name on the Hugging Face Hub,")
    try:
        folder = library.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=patterns_of_other_folders(CHAT_TEMPLATES_DIR),
            token=access_token or None,
        )
    except Exception as error:  # network, cache, permissions: no common base class
        reason = failure_reason(library, error, repository, revision)
        raise ConfigError(f"{prefix}{reason}") from error
    return Path(folder)


def patterns_of_other_folders(name: str) -> list[str]:
    """Patterns, in which `*` also matches slashes, of all files in folders except those directly in
    the folder `name`.
    """
    others = [f"{name[:i]}[!{letter}]*/*" for i, letter in enumerate(name)]
    return [*others, *(f"{name[:i]}/*" for i in range(len(name))), f"{name}[!/]*/*", f"{name}/*/*"]


def failure_reason(library: Any, error: Exception, repository: str, revision: str | None) -> str:
    errors = library.errors
    where = repository if revision is None else f"revision {revision} of {repository}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        option = "" if revision is None else f" --revision {revision}"
        cached = Path(library.constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
        return (
            f"{where} is not complete in the cache of the Hugging Face Hub, which cannot be "
            f"reached: run `hf download {repository}{option}` where it can, and copy the folder "
            f"models--{repository.replace('/', '--')} of its cache to {cached}, or copy the files "
            "to any folder and name that"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision} on the Hugging Face Hub: check it"
    if isinstance(error, errors.RepositoryNotFoundError):  # also a gated one
        return (
            f"the Hugging Face Hub shows no {repository}: check the name, and for a private or "
            "gated repository set HF_TOKEN to a token that may read it"
        )
    return (
        f"the download of {where} from the Hugging Face Hub failed ({type(error).__name__}): "
        "check the network and the space on disk, or copy the files to a folder and name that"
    )
