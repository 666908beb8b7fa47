"""Text generation: the engine, and the `LLM` around it."""

import importlib
from typing import Any

MODULES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "EngineError": "errors",
    "GenerationRequest": "requests",
    "Completion": "requests",
    "SamplingParams": "sampling.params",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import maxtext` stays light."""
    if name in MODULES:
        return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
