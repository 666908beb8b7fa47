"""What decode, chat and batch share: from words to a model that answers, and from texts to prompts
of token ids.

A model is a folder (Hugging Face's, ours, or a run's checkpoints) or the name of one, which gives
random weights.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from maxtext.cli.train import set_up_jax
from maxtext.common import log, progress
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path
from maxtext.configs import fields, ledger, load, sources
from maxtext.configs.load import base_values, peek_setting
from maxtext.configs.provenance import Setting, Source
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.inference import LLM, Answer, Ask
    from maxtext.tokenizers import ChatTemplate, Tokenizer

PLAIN, DIM = "\x1b[0m", "\x1b[2m"


@dataclass
class Answering:
    """A model, and what the configuration says of its prompts and the length of its answers."""

    llm: "LLM"
    config: MaxTextConfig
    place: str  # of the model, for messages
    loading_seconds: float = 0.0
    fresh: bool = True  # the first answer compiles programs

    @property
    def tokenizer(self) -> "Tokenizer":
        if self.llm.tokenizer is None:
            raise ConfigError(
                f"{self.place} came without a tokenizer: name one with tokenizer_path=…"
            )
        return self.llm.tokenizer

    @cached_property
    def template(self) -> "ChatTemplate":
        from maxtext.tokenizers import chat_template

        found = chat_template(self.config, self.tokenizer)
        if found is None:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name} came without a chat template: name a file of one with "
                "chat_template_path=FILE, or complete plain text with `maxtext decode`"
            )
        return found

    def prompt(self, text: str) -> list[int]:
        """The ids of a text to continue; with use_chat_template, of a conversation in which a user
        says it.
        """
        if self.config.use_chat_template:
            return self.conversation([{"role": "user", "content": text}])
        if self.config.add_bos:
            return self.tokenizer.encode_prompt(text)
        return self.tokenizer.encode_with_specials(text)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation, up to where the model is to answer."""
        return self.tokenizer.encode_with_specials(
            self.template.render(messages, add_generation_prompt=True)
        )

    @property
    def reserved(self) -> int | None:
        """Tokens that are kept for the prompt, where a person said how many; else prompt and answer
        share the room.
        """
        chosen = self.config.source("max_prefill_predict_length").is_user
        return self.config.max_prefill_predict_length if chosen else None

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow a prompt."""
        length, whole = len(prompt), self.config.max_target_length
        if not length:
            raise ConfigError("the prompt is empty: there is nothing to continue")
        if self.reserved is not None and length > self.reserved:
            raise ConfigError(
                f"the prompt has {length} tokens, but max_prefill_predict_length={self.reserved}: raise it, or shorten "
                "the prompt"
            )
        left = whole - (self.reserved or length)
        if left < 1:
            raise ConfigError(
                f"the prompt has {length} tokens, and max_target_length={whole} leaves no room for an answer: raise "
                "it, or shorten the prompt"
            )
        return left

    def spoken(self, ask: "Ask") -> Generator[tuple[str, "Answer | None"]]:
        """One answer as it comes: pieces of text, the last with the whole answer."""
        progress.start("compiling for this model and answering" if self.fresh else "answering")
        self.fresh = False
        for piece, answer in self.llm.serving(1, self.config.max_target_length).run(iter([ask])):
            if answer is not None and answer.error:
                raise UserError(answer.error)
            yield piece, answer


def settle(place: str, path: str | None, overrides: Sequence[str]) -> Any:
    """The configuration of FILE and key=value words for the model at `place`."""
    chosen = sources.from_overrides(overrides)
    if local_path(place).is_dir():
        from maxtext.checkpoint.open import open_checkpoint

        model = open_checkpoint(place).settings
        learned = model.get("trainable_position_size")
        if (
            learned is not None
            and peek_setting("max_target_length", path, chosen, os.environ) is None
        ):
            chosen["max_target_length"] = Setting(
                learned.value, Source("derived", "learned positions")
            )
        config = load(path, chosen, model=model)
    elif place in fields.choices("model_name"):
        said = peek_setting("model_name", path, chosen, os.environ)
        if said not in (None, place):
            raise ConfigError(f"which of the two, {place} or model_name={said}? leave one out")
        config = load(
            path,
            chosen if said else chosen | {"model_name": Setting(place, Source("command line"))},
        )
    else:
        hint = sources.suggest(place, fields.choices("model_name"))
        raise ConfigError(f"{place!r} is neither a folder nor the name of a model{hint}")
    ledger.refuse_unsupported_model(config, base_values())
    reserved = config.max_prefill_predict_length
    if config.source("max_prefill_predict_length").is_user and reserved >= config.max_target_length:
        raise ConfigError(
            f"max_prefill_predict_length={reserved} leaves nothing of max_target_length={config.max_target_length} "
            "for the answer: raise max_target_length"
        )
    return config


def open_model(place: str, config: MaxTextConfig, text: bool = True) -> Answering:
    """The model itself, by a configuration from `settle`; without `text`, for ids alone."""
    began = time.perf_counter()
    log.configure(level=logging.WARNING)
    set_up_jax(config)
    from maxtext.inference import LLM
    from maxtext.tokenizers import load_tokenizer

    # What the environment says is read again there.
    keys = {
        key: getattr(config, key)
        for key in fields.KEYS
        if config.source(key).kind in ("file", "command line")
    }
    folder = local_path(place)
    if not folder.is_dir():
        note(f"{place} is a name, not a checkpoint: its weights are random, and so is what it says")
        keys.pop("model_name", None)  # it is the place
    with loading(place) as progress:
        llm = LLM.load(folder.absolute() if folder.is_dir() else place, progress, **keys)
    if text and config.tokenizer_path and llm.tokenizer is None:
        llm.tokenizer = load_tokenizer(config)
    return Answering(llm, config, place, time.perf_counter() - began)


@contextlib.contextmanager
def loading(place: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A sign of life on a terminal, which leaves no trace; nothing elsewhere."""
    progress.stop()
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"loading {place}") as status:
        yield lambda done, total, name: status.update(
            f"loading {place}: {done / max(total, 1):.0%}"
        )


def refuse(config: MaxTextConfig, verb: str, reasons: Mapping[str, str]) -> None:
    """Keys of the other doors, which would do nothing behind this one."""
    problems = [
        f"{key}={ledger.shown(getattr(config, key))} ({config.source(key)}) would do nothing in `maxtext {verb}`: {why}"
        for key, why in reasons.items()
        if config.source(key).is_user and getattr(config, key) != getattr(base_values(), key)
    ]
    if problems:
        raise ConfigError(*problems)


def styled(stream: TextIO) -> bool:
    """Whether a person reads the stream, with colours."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def dim(text: str, stream: TextIO) -> str:
    return f"{DIM}{text}{PLAIN}" if styled(stream) else text


def note(text: str) -> None:
    """A line beside what the model says."""
    print(dim(text, sys.stderr), file=sys.stderr, flush=True)


def write(text: str, style: str = "") -> None:
    """Text as it comes, at once. A terminal does not obey what a model writes: control characters
    become U+FFFD.
    """
    out = sys.stdout
    if out.isatty():
        text = "".join(
            c if (c >= " " and not "\x7f" <= c < "\xa0") or c in "\n\t" else "\ufffd" for c in text
        )
    if style and styled(out):
        text = f"{style}{text}{PLAIN}"
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, errors="replace").decode(encoding))
    out.flush()
