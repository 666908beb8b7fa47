"""Level 6: models that answer."""

import importlib
from typing import Any

PLACES = {"LLM": "llm", "Ask": "text", "Answer": "text", "Sampling": "sampling"}


def __getattr__(name: str) -> Any:
    """Imported when used, so that `import maxtext` stays light."""
    if name in PLACES:
        return getattr(importlib.import_module(f"{__name__}.{PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
