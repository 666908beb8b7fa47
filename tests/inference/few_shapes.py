"""For tests that do not depend on the shapes of programs: few of them are compiled."""

from typing import Any

from maxtext.inference.sampling.params import SamplingMode


def patch(monkeypatch: Any) -> None:
    """Prefill batches have at least four rows of 32 tokens, and one sampling mode serves all."""
    shapes = "maxtext.inference.engine.shapes"
    monkeypatch.setattr(f"{shapes}.MIN_ROW_TOKENS", 32)
    monkeypatch.setattr(
        f"{shapes}.next_power_of_two", lambda count: 1 << max(count - 1, 3).bit_length()
    )
    monkeypatch.setattr(
        "maxtext.inference.engine.batches.batch_mode", lambda params: SamplingMode.TRUNCATED
    )
