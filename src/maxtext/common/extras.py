"""Optional packages: imported where used; a missing one names the command that installs it."""

import importlib
from types import ModuleType

from maxtext.common.errors import MissingExtra

# package (as imported) -> the extra of pyproject.toml that brings it
EXTRA_OF = {
    "datasets": "hf",
    "transformers": "hf",
    "pyarrow": "parquet",
    "huggingface_hub": "hf",
    "sentencepiece": "text",
    "tiktoken": "text",
    "tensorflow_datasets": "tfds",
    "wandb": "wandb",
    "libtpu": "tpu",
    "fastapi": "serve",
    "uvicorn": "serve",
}


def require(module: str, feature: str) -> ModuleType:
    """Import `module`, or say which extra `feature` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = EXTRA_OF[module.split(".")[0]]
        raise MissingExtra(
            f"{feature} needs the package {module!r}, which is not installed ({error}); "
            f'install it with: pip install "maxtext[{extra}]"'
        ) from error
