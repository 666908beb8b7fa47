"""How much of a text is tokenized: no more than the maximum length can need.

A text of a few megabytes takes seconds and hundreds of megabytes of memory to tokenize.
"""

import re
from collections.abc import Callable

from maxtext.inference.validation import RequestError

# A token has at most as many characters, where the vocabulary sets no limit: an unknown token may
# stand for any number of them.
MAX_TOKEN_CHARS = 256
USUAL_TOKEN_CHARS = 8  # most texts have fewer characters a token
# Tokens at the beginning of a part of a text may differ from those of the whole text.
OVERLAP = 64
MAX_WORD_CHARS = 1024  # within which a part is moved to begin with a word
# Every kind of tokenizer begins a token with this blank, whatever stands before it.
WORD_START = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


def check_text_length(text: str, max_length: int, token_chars: int | None) -> None:
    """Raises RequestError for a text that exceeds `max_length` tokens whatever its tokens are. A
    token has `token_chars` characters at most; None: the vocabulary sets no limit.
    """
    at_least = -(-len(text) // (token_chars or MAX_TOKEN_CHARS))
    if at_least > max_length:
        raise RequestError(
            f"the maximum length is {max_length} tokens, but the prompt has at least {at_least} "
            "tokens",
            code="context_length_exceeded",
        )


def encode_end(
    text: str, count: int, encode: Callable[[str], list[int]], token_chars: int | None
) -> list[int]:
    """The last `count` ids of `encode(text)`, from the end of the text alone. Raises RequestError
    if more characters than `count` tokens can have are fewer tokens.
    """
    num_chars = (count + OVERLAP) * USUAL_TOKEN_CHARS
    limit = (count + OVERLAP) * (token_chars or MAX_TOKEN_CHARS) + MAX_WORD_CHARS
    while num_chars < len(text):
        num_chars = min(num_chars, limit)
        start = len(text) - num_chars
        if match := WORD_START.search(text, start, start + MAX_WORD_CHARS):
            start = match.start()
        ids = encode(text[start:])
        if len(ids) >= count + OVERLAP:
            return ids[-count:]
        if num_chars == limit:
            raise RequestError(
                f"the last {limit} characters of the prompt are only {len(ids)} tokens, fewer than "
                f"truncate_prompt_tokens={count}: send less blank or unknown text",
                "truncate_prompt_tokens",
            )
        num_chars *= 4
    return encode(text)[-count:]
