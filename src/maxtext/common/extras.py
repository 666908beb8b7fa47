"""Optional packages are imported where they are used. A missing one is reported with the command
that installs it.
"""

import importlib
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType

from maxtext.common.errors import MissingExtra

# imported package -> the extra of pyproject.toml that installs it
EXTRA_OF = {
    "datasets": "hf",
    "pyarrow": "parquet",
    "huggingface_hub": "hf",
    "sentencepiece": "text",
    "tiktoken": "text",
    "tensorflow_datasets": "tfds",
    "wandb": "wandb",
    "matplotlib": "plot",
    "prometheus_client": "prometheus",
    "llguidance": "serve",
    "starlette": "serve",
    "uvloop": "serve",
    "httptools": "serve",
    "math_verify": "math",
    "lm_eval": "eval",
    "libtpu": "tpu",
}


def require(module: str, feature: str) -> ModuleType:
    """Import `module`. Raises MissingExtra, which names the extra that `feature` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = EXTRA_OF[module.split(".")[0]]
        raise MissingExtra(
            f"{feature} needs the package {module!r}, which is not installed ({error}); "
            f"install it with: {install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """The command that installs an extra of pyproject.toml: that of a checkout, if the package runs
    from one, since it is not published by name.
    """
    checkout = Path(__file__).parents[3]
    if not (checkout / "pyproject.toml").is_file():
        return f'pip install "maxtext[{extra}]"'
    if checkout == Path.cwd():
        return f'pip install -e ".[{extra}]"'
    return f'pip install -e "{checkout}[{extra}]"'


def libtpu_mismatch() -> str | None:
    """A sentence if the installed libtpu is not the one that the installed jax pins, else None.

    A newer libtpu compiles, but jax may not be able to read its programs.
    """
    try:
        installed, jax = metadata.version("libtpu"), metadata.version("jax")
    except metadata.PackageNotFoundError:
        return None
    pins = [
        re.match(r"libtpu\s*==\s*([\w.]+?)(\.\*)?\s*(?:;|$)", line)
        for line in metadata.requires("jax") or ()
    ]
    for version, any_patch in (pin.groups() for pin in pins if pin):
        if installed != version and not (any_patch and installed.startswith(f"{version}.")):
            pinned = f"{version}{any_patch or ''}"
            return f"libtpu {installed} is installed, but jax {jax} requires libtpu {pinned}"
    return None
