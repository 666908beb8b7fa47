"""For tests of what does not depend on the shapes of programs: few of them are compiled."""

from typing import Any

from maxtext.inference.sampling import Kind

PLACE = "maxtext.inference.scheduler"


def patch(monkeypatch: Any) -> None:
    """Prompts go in by four rows of 32 tokens, and tokens are drawn in the one way that does for
    all.
    """
    monkeypatch.setattr(f"{PLACE}.LEAST_WIDTH", 32)
    monkeypatch.setattr(f"{PLACE}.power", lambda count: 1 << max(count - 1, 3).bit_length())
    monkeypatch.setattr(f"{PLACE}.kind_of", lambda samplings: Kind.TRUNCATED)
