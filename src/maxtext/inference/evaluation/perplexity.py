"""The perplexity of texts, over windows of tokens.

    nll_per_token = -Σ_i log p(token_i | window before i) / tokens
    perplexity    = exp(nll_per_token)
    bits_per_byte = -Σ_i log2 p(token_i | window before i) / bytes

Each window begins `stride` tokens after the one before it. A token is counted in the first window
that has it, unless it is the first of that window and so has no context. With stride = window,
windows do not overlap and the first token of each is not counted; a smaller stride gives every
token at least window - stride tokens of context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Json
from maxtext.inference.evaluation.loglikelihood import (
    Progress,
    TokenSpan,
    compute_loglikelihoods,
)
from maxtext.inference.llm import LLM
from maxtext.inference.text.session import NO_TOKENIZER
from maxtext.input_pipeline.formats import (
    BadRecord,
    Documents,
    find_files,
    kind_of,
    open_files,
)

THREADS = 4  # that open files


@dataclass(frozen=True)
class Windows:
    """`length` tokens each, `stride` tokens apart."""

    length: int
    stride: int

    def spans(self, token_ids: np.ndarray) -> Iterator[TokenSpan]:
        """The spans of a text's tokens that are counted."""
        end = 0  # of the tokens that an earlier window has counted
        for begin in range(0, len(token_ids), self.stride):
            start = max(end, begin + 1)
            end = min(begin + self.length, len(token_ids))
            if start < end:
                yield TokenSpan(token_ids[begin:end], start - begin)
            if end == len(token_ids):
                return


@dataclass(frozen=True)
class Perplexity:
    """The negative log-likelihood of texts, in nats."""

    nll: float
    tokens: int  # that were counted
    bytes: int  # of the texts, in UTF-8

    def record(self) -> Json:
        return {
            "nll_per_token": self.nll / self.tokens,
            "perplexity": float(np.exp(self.nll / self.tokens)),
            "bits_per_byte": float(self.nll / np.log(2) / self.bytes),
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


def make_windows(max_length: int, length: int | None, stride: int | None) -> Windows:
    """`length` defaults to `max_length`, and `stride` to `length`. Raises ConfigError if they do
    not fit.
    """
    length = max_length if length is None else length
    stride = length if stride is None else stride
    if length > max_length:
        raise ConfigError(
            f"--window {length} is longer than max_target_length={max_length}: raise that key"
        )
    if not 1 <= stride <= length:
        raise ConfigError(f"--stride {stride} must be from 1 to --window {length}")
    return Windows(length, stride)


def open_texts(path: str) -> Documents:
    """The texts of files: JSON lines, Parquet … with a column `text`, or plain text, by their
    names. Raises ConfigError if there are none.
    """
    files = find_files("--perplexity", path)
    kinds = {kind_of(file) or "text" for file in files}
    if len(kinds) > 1:
        raise ConfigError(f"{path} has files of several kinds, {' and '.join(sorted(kinds))}")
    documents = open_files(files, kinds.pop(), ["text"], THREADS)
    if not len(documents):
        raise ConfigError(f"{path} is empty: there is no text to evaluate")
    return documents


def read_texts(documents: Documents) -> Iterator[str]:
    """Raises UserError for a record that cannot be read or has no text."""
    for index in range(len(documents)):
        try:
            text = documents[index]["text"]
        except BadRecord as error:
            raise UserError(str(error)) from error
        if not isinstance(text, str):
            path, location = documents.where(index)
            raise UserError(f"{path}, {location}: text is a {type(text).__name__}")
        yield text


def compute_perplexity(
    llm: LLM, texts: Sequence[str] | Iterator[str], windows: Windows, progress: Progress | None
) -> Perplexity:
    """Of all texts together. No window has tokens of two texts, which begin with the special tokens
    of the vocabulary. Raises UserError if no token is counted.
    """
    if llm.tokenizer is None:
        raise ConfigError(f"{NO_TOKENIZER}: name one with tokenizer_path=…")
    spans: list[TokenSpan] = []
    num_bytes = 0
    for text in texts:
        num_bytes += len(text.encode("utf-8", errors="replace"))
        token_ids = np.array(llm.tokenizer.encode_prompt(text), np.int32)
        spans += windows.spans(token_ids)
    tokens = sum(len(span.token_ids) - span.start for span in spans)
    if not tokens:
        raise UserError("the text is too short: no token has another before it in its window")
    results = compute_loglikelihoods(llm, spans, progress)
    return Perplexity(-sum(result.logprob for result in results), tokens, num_bytes)
