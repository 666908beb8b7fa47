"""Grammars that constrain sampling, by llguidance: which tokens may follow, as bits.

A `GrammarCompiler` belongs to one model. It compiles the constraint of a request to a
`GrammarMatcher`, which follows one sequence. Compiled grammars are cached, so a constraint that
many requests share is compiled once.

A short constraint may take minutes to compile, and nothing can interrupt the library. It therefore
runs in a few threads of its own, and a request waits no longer than COMPILE_SECONDS for them.

`fill_masks` writes on the host which tokens may follow, and `mask_logits` applies these masks to
logits on the device.

Shapes: B rows, V vocabulary, W = ceil(V / 32) words of a mask.
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.extras import require
from maxtext.common.trees import Array
from maxtext.inference.errors import EngineError
from maxtext.inference.sampling.structured_outputs import StructuredOutputs
from maxtext.inference.validation import RequestError
from maxtext.tokenizers import Tokenizer
from maxtext.tokenizers.load import concatenates, text_bytes

FEATURE = "structured output"
WORD_BITS = 32  # of a mask
ALL_TOKENS = 0xFFFFFFFF  # a word of a mask
SPECIAL_MARKER = b"\xff"
MAX_CACHED = 128  # compiled grammars
MAX_REASON = 300  # characters of an error
MAX_GRAMMAR_SIZE = 20_000  # symbols; a property that is not required has about nine
MAX_COMPILING = 4  # grammars at a time
COMPILE_SECONDS = 10.0  # that a request waits for its grammar
# Of a thread that compiles: the library recurses over a chain of rules, and the end of the stack
# would be the end of the process. The usual 8 MiB are enough for about 2000 rules.
STACK_BYTES = 256 * 2**20
STACK_LOCK = threading.Lock()
NO_TEXT = "NoExtensionBias"  # the name of llguidance for a grammar that no token can begin
FAILURE = "the constraints of the request cannot be followed"  # while tokens are sampled
# One blank at most between the parts of a JSON text: with any number of them, a weak model would
# write blanks up to its limit.
JSON_OPTIONS = {"whitespace_pattern": " ?"}


class GrammarMatcher:
    """The state of a grammar after some tokens of a sequence."""

    def __init__(self, inner: Any, vocab_size: int):
        self.inner = inner
        self.vocab_size = vocab_size

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self.inner.deep_copy(), self.vocab_size)

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return -(-self.vocab_size // WORD_BITS)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Append the longest beginning of these tokens that is allowed; returns its length."""
        return self.inner.try_consume_tokens(list(token_ids))

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, such as a limit of its parser; empty if it can."""
        return read_error(self.inner)


def fill_masks(matchers: Sequence[GrammarMatcher], rows: Sequence[int], masks: np.ndarray) -> None:
    """Write which tokens may follow each matcher into its row of masks, uint32 [B, W]: bit t % 32
    of word t // 32 is that of token t. Several cores work on several rows.
    """
    fill = require("llguidance.numpy", FEATURE).fill_next_token_bitmask_par
    pairs = [(matcher.inner, row) for matcher, row in zip(matchers, rows, strict=True)]
    fill(mask_executor(), pairs, masks.view(np.int32))


@functools.cache
def mask_executor() -> Any:
    return require("llguidance", FEATURE).LLExecutor()


class GrammarCompiler:
    """Thread-safe: the server compiles in worker threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        """`vocab_size` is the model's, which may be larger than the tokenizer's. Raises
        MissingExtra without llguidance, and RequestError if the model has no end-of-sequence token
        or the tokenizer's tokens are not parts of the text.
        """
        self.llguidance = require("llguidance", FEATURE)
        self.limits = self.llguidance.LLParserLimits(
            verbose_errors=False, max_grammar_size=MAX_GRAMMAR_SIZE
        )
        self.vocab_size = vocab_size
        if not eos_ids:
            raise RequestError(
                "structured output needs an end-of-sequence token, and this model has none"
            )
        if not concatenates(tokenizer):
            raise RequestError(
                f"structured output needs tokens that are parts of the text, and {tokenizer.name} "
                "joins words by rules of its own"
            )
        token_bytes = TokenBytes(tokenizer, vocab_size, eos_ids[0])
        self.tokenizer = self.llguidance.LLTokenizer(token_bytes, vocab_size, list(eos_ids))
        self.lock = threading.Lock()
        self.compiled: OrderedDict[tuple[str, ...], Future[Any]] = OrderedDict()
        self.compile_slots = threading.BoundedSemaphore(MAX_COMPILING)

    def matcher(self, constraint: StructuredOutputs) -> GrammarMatcher:
        """A matcher at the beginning of a text. Raises RequestError if the constraint cannot be
        compiled in COMPILE_SECONDS, and EngineError if others are compiled all that time.
        """
        key = constraint.kind, constraint.text, constraint.preamble
        with self.lock:
            future = self.compiled.get(key)
        if future is None:
            future = self.start(key, constraint)
        try:
            matcher = future.result(COMPILE_SECONDS)
        except TimeoutError as error:
            raise RequestError(
                f"{constraint.param} takes longer than {COMPILE_SECONDS:g} seconds to compile",
                constraint.param,
            ) from error
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:MAX_REASON]
            message = f"{constraint.param} cannot be compiled: {reason}"
            raise RequestError(message, constraint.param) from error
        with self.lock:
            self.compiled[key] = future
            self.compiled.move_to_end(key)
            while len(self.compiled) > MAX_CACHED:
                self.compiled.popitem(last=False)
            return GrammarMatcher(matcher.deep_copy(), self.vocab_size)

    def start(self, key: tuple[str, ...], constraint: StructuredOutputs) -> "Future[Any]":
        """The matcher of llguidance that a thread compiles now. The thread does not keep the
        process from ending.
        """
        if not self.compile_slots.acquire(timeout=COMPILE_SECONDS):
            message = "the server compiles grammars of other requests: try again"
            raise EngineError(message, "grammar_queue_full", COMPILE_SECONDS)
        with self.lock:
            if key in self.compiled:  # another request was first
                self.compile_slots.release()
                return self.compiled[key]
            future = self.compiled[key] = Future()

        def run() -> None:
            try:
                future.set_result(self.compile(constraint))
            except BaseException as error:
                with self.lock:
                    self.compiled.pop(key, None)
                future.set_exception(error)
            finally:
                self.compile_slots.release()

        with STACK_LOCK:
            default = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=run, name="maxtext-grammar", daemon=True).start()
            finally:
                threading.stack_size(default)
        return future

    def compile(self, constraint: StructuredOutputs) -> Any:
        """Raises ValueError or RecursionError if the constraint cannot be compiled."""
        create = self.llguidance.LLMatcher
        if constraint.kind == "json":
            grammar = create.grammar_from_json_schema(constraint.text, overrides=JSON_OPTIONS)
        elif constraint.kind == "choice":
            # As a terminal: the parser has a limit of 2000 alternatives of a rule.
            texts = dict.fromkeys(json.loads(constraint.text))
            grammar = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, texts))
        else:
            grammar = self.llguidance.grammar_from(constraint.kind, constraint.text)
        if constraint.preamble:
            grammar = append_grammar(constraint.preamble, grammar)
        matcher = create(self.tokenizer, grammar, log_level=0, limits=self.limits)
        # A grammar that refers to itself without end is only detected by its first mask.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if error := read_error(first):
            raise ValueError("no text can match it" if error == NO_TEXT else error)
        return matcher


def read_error(matcher: Any) -> str:
    """The error of a matcher of llguidance on one line; empty if it has none."""
    error = matcher.get_error() if matcher.is_error() else ""
    return " ".join(error.replace("<non-verbose/>", "").split())


def append_grammar(preamble: str, grammar: str) -> str:
    """A grammar of llguidance for a text of `preamble`, in Lark syntax, and then one of `grammar`,
    in Lark syntax or as llguidance's JSON.
    """
    is_json = grammar.lstrip().startswith("{")
    last = json.loads(grammar)["grammars"][0] if is_json else {"lark_grammar": grammar}
    first = f"start: preamble @answer\npreamble: {preamble}\n"
    return json.dumps({"grammars": [{"lark_grammar": first}, {**last, "name": "answer"}]})


class TokenBytes:
    """A tokenizer as llguidance takes it: the bytes of every token, of special tokens those of
    their names, which must differ.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int):
        special = tokenizer.special_ids | {eos_id}
        self.tokens = [
            tokenizer.id_to_token(token).encode()
            if token in special and token < tokenizer.vocab_size
            else without_marker(text_bytes(tokenizer, token))
            for token in range(vocab_size)
        ]
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def without_marker(data: bytes) -> bytes:
    """The bytes of a token of text; none if they have the byte that llguidance puts before special
    tokens, since the token would be allowed wherever a special one is. UTF-8 does not have it.
    """
    return b"" if SPECIAL_MARKER in data else data


def mask_logits(logits: jax.Array, mask: Array) -> jax.Array:
    """Logits [B, V] with -inf for tokens whose bit in mask [B, W] is 0."""
    bits = (mask[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[-1]] > 0
    return jnp.where(allowed, logits, -jnp.inf)
