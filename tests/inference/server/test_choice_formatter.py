"""Offsets of tokens in the text of a completion, and the prompt before it."""

from types import SimpleNamespace

import pytest

from maxtext.inference.requests import Completion, CompletionDelta
from maxtext.inference.sampling.logprobs import TokenLogprobs
from maxtext.inference.server.completions_writer import ChoiceFormatter
from maxtext.inference.server.messages import MessageFormat


def formatter_of(tokens, prompt=(), echo=False, logprobs=0):
    """For a model whose tokens are these bytes; `prompt` has ids."""

    def decode(ids):
        return b"".join(tokens[token] for token in ids).decode("utf-8", "replace")

    model = SimpleNamespace(
        token_bytes=lambda token, _: tokens[token],
        token_text=str,
        tokenizer=SimpleNamespace(decode=decode),
    )
    request = SimpleNamespace(
        echoes=(decode(prompt),) if echo else (),
        num_choices=1,
        format=MessageFormat(),
        shows_specials=False,
        shows_token_ids=False,
        logprobs=logprobs,
        is_chat=False,
        return_token_ids=False,
    )
    return ChoiceFormatter(model, request, index=0, prompt=prompt)


def logprobs_of(tokens):
    return [TokenLogprobs(-1.0, {token: -1.0}) for token in tokens]


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
    ids = range(len(tokens))
    result = formatter_of(tokens).completion_logprobs(ids, logprobs_of(ids))
    assert result["text_offset"] == offsets


# The bytes of the prompt; of the completion; its text; the offsets of its tokens.
INCOMPLETE_PROMPTS = [
    ([b"a", b"\xc3"], [b"\xa9", b"b"], "éb", [0, 1]),
    ([b"a", b"\xf0", b"\x9f"], [b"\x99", b"\x82", b"b", b"c"], "🙂bc", [0, 0, 1, 2]),
    ([b"a", b"\xf0"], [b"b", b"c"], "bc", [0, 1]),
    ([b"a", *[b"\xf0"] * 9], [b"b", b"c"], "bc", [0, 1]),
    ([b"a", b"\xf0\x9f"], [b"\x99", b"b", b"c"], "bc", [0, 0, 1]),
    ([b"a", b"\xf0"], [b"\xf0", b"b"], "�b", [0, 1]),
    ([b"a", b"\xe0"], [b"\x80", b"b"], "�b", [0, 1]),
]


@pytest.mark.parametrize(("prompt", "tokens", "text", "offsets"), INCOMPLETE_PROMPTS)
def test_text_offsets_after_a_prompt_that_ends_inside_a_character(prompt, tokens, text, offsets):
    ids = range(len(prompt), len(prompt) + len(tokens))
    formatter = formatter_of([*prompt, *tokens], range(len(prompt)))
    assert formatter.completion_logprobs(ids, logprobs_of(ids))["text_offset"] == offsets


@pytest.mark.parametrize(("prompt", "tokens", "text", "offsets"), INCOMPLETE_PROMPTS)
def test_echo_and_text_are_the_text_of_all_tokens(prompt, tokens, text, offsets):
    """A character that the completion completes is not part of the echo."""
    vocabulary = [*prompt, *tokens]
    ids = tuple(range(len(prompt), len(vocabulary)))
    completion = Completion(index=0, token_ids=ids, text=text, finish_reason="length")
    expected = b"".join(vocabulary).decode("utf-8", "replace")
    formatter = formatter_of(vocabulary, range(len(prompt)), echo=True, logprobs=None)
    assert formatter.choice(completion, ())["text"] == expected
    # The detokenizer holds back tokens until their text is final.
    deltas = [
        CompletionDelta(index=0, choice=0, text=""),
        CompletionDelta(index=0, choice=0, text=text[:1], token_ids=ids[:-1]),
        CompletionDelta(0, 0, text=text[1:], token_ids=ids[-1:], completion=completion),
    ]
    formatter = formatter_of(vocabulary, range(len(prompt)), echo=True, logprobs=None)
    chunks = [chunk for delta in deltas for chunk in formatter.chunks(delta, ())]
    assert "".join(chunk["text"] for chunk in chunks) == expected
