"""The tokens that engines draft."""

import jax

from maxtext.inference.engine.decode_loop import DecodeLoop


def recorded_drafts(monkeypatch):
    """The drafts of each step of single sequences, as (position of the newest token, drafts)."""
    steps = []

    def record(positions, drafts):
        steps.extend(zip(positions.tolist(), drafts.tolist(), strict=True))

    def draft(self, inputs, draft=DecodeLoop.draft):
        drafts, state = draft(self, inputs)
        jax.debug.callback(record, inputs.newest, drafts)
        return drafts, state

    monkeypatch.setattr(DecodeLoop, "draft", draft)
    return steps
