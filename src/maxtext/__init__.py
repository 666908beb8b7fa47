"""maxtext: training, fine-tuning and inference of open language models in JAX."""

import sys

from maxtext.cli.entry import AliasFinder

sys.meta_path.append(AliasFinder())
TYPE_CHECKING = False  # type checkers assume True; importing typing itself would be slow

if TYPE_CHECKING:
    from typing import Any

    from maxtext import losses, rewards, tune
    from maxtext.inference.llm import LLM
    from maxtext.models.configuration import config

__all__ = ["LLM", "__version__", "config", "losses", "rewards", "tune"]


def __getattr__(name: str) -> "Any":
    """Names load on first use, so that `import maxtext` and `maxtext --help` stay instant."""
    if name == "config":
        from maxtext.models.configuration import config

        return config
    if name == "LLM":
        from maxtext.inference.llm import LLM

        return LLM
    if name in ("losses", "rewards", "tune"):
        import importlib

        return importlib.import_module(f"maxtext.{name}")
    if name == "__version__":
        from importlib import metadata

        return metadata.version("maxtext")
    raise AttributeError(f"module 'maxtext' has no attribute {name!r}")
