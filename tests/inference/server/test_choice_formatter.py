"""Offsets of tokens in the text of a completion."""

from types import SimpleNamespace

import pytest

from maxtext.inference.logprobs import TokenLogprobs
from maxtext.inference.server.choices import ChoiceFormatter
from maxtext.inference.server.messages import MessageFormat


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        ([b"a", b"bc", b"d"], [0, 1, 3]),
        ([b"a", b"\xc3", b"\xa9", b"b"], [0, 1, 1, 2]),  # é
        ([b"\xf2", b"\xf2", b"a", b"b"], [0, 1, 2, 3]),  # two replacement characters
        ([b"\xf2", b"", b"a"], [0, 0, 1]),  # with a special token
    ],
)
def test_text_offsets(tokens, offsets):
    model = SimpleNamespace(token_bytes=lambda token, _: tokens[token], token_text=str)
    request = SimpleNamespace(
        echoes=(), num_choices=1, format=MessageFormat(), shows_specials=False, logprobs=0
    )
    formatter = ChoiceFormatter(model, request, index=0, prompt=[])
    entries = [TokenLogprobs(-1.0, {token: -1.0}) for token in range(len(tokens))]
    result = formatter.completion_logprobs(range(len(tokens)), entries)
    assert result["text_offset"] == offsets
