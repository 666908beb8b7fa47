"""Functions that decode, chat, batch and bench share: from arguments to a loaded model, and from
texts to prompts of token ids.

A model is a folder (Hugging Face, native, or a run's checkpoints), org/name of the Hugging Face
Hub, or the name of a model, which gives random weights.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

from maxtext.common import log, processes, progress
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.hub import find_folder
from maxtext.configs import fields, ledger, sources
from maxtext.configs.load import base_values, peek_setting
from maxtext.configs.provenance import Setting, Source
from maxtext.configs.startup import process_settings
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.checkpoint.open import Checkpoint
    from maxtext.inference import LLM, Completion, GenerationRequest
    from maxtext.tokenizers import ChatTemplate, Tokenizer

PLAIN, DIM = "\x1b[0m", "\x1b[2m"


@dataclass(frozen=True)
class ResolvedModel:
    """A model with its configuration, before its weights are loaded."""

    path: str  # of a folder, or the name of a model
    config: MaxTextConfig
    checkpoint: "Checkpoint | None"  # None: random weights


@dataclass
class GenerationSession:
    """A loaded model with the configuration of its prompts and the length of its completions."""

    llm: "LLM"
    config: MaxTextConfig
    path: str  # of the model, for messages
    load_seconds: float = 0.0
    is_first: bool = True  # the first completion compiles programs

    @property
    def tokenizer(self) -> "Tokenizer":
        if self.llm.tokenizer is None:
            raise ConfigError(
                f"{self.path} came without a tokenizer: name one with tokenizer_path=…"
            )
        return self.llm.tokenizer

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        from maxtext.tokenizers import chat_template

        template = chat_template(self.config, self.tokenizer)
        if template is None:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name} came without a chat template: name a file of"
                " one with chat_template_path=FILE, or complete plain text with `maxtext decode`"
            )
        return template

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text to continue; with use_chat_template, of a chat with this user
        message.
        """
        if self.config.use_chat_template:
            return self.encode_chat([{"role": "user", "content": text}])
        if self.config.add_bos:
            return self.tokenizer.encode_prompt(text)
        return self.tokenizer.encode_with_specials(text)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The ids of a chat, up to where the model's message begins."""
        return self.tokenizer.encode_with_specials(
            self.chat_template.render(messages, add_generation_prompt=True)
        )

    @property
    def reserved_prompt_tokens(self) -> int | None:
        """The tokens that max_prefill_predict_length, if it is set, reserves for the prompt.
        Otherwise prompt and completion share max_target_length.
        """
        is_set = self.config.source("max_prefill_predict_length").is_user
        return self.config.max_prefill_predict_length if is_set else None

    def max_new_tokens(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens may follow a prompt. Raises ConfigError if none may."""
        length, limit = len(prompt_ids), self.config.max_target_length
        reserved = self.reserved_prompt_tokens
        if not length:
            raise ConfigError("the prompt is empty: there is nothing to continue")
        if reserved is not None and length > reserved:
            raise ConfigError(
                f"the prompt has {length} tokens, but max_prefill_predict_length={reserved}: "
                "raise it, or shorten the prompt"
            )
        remaining = limit - (reserved or length)
        if remaining < 1:
            raise ConfigError(
                f"the prompt has {length} tokens, and max_target_length={limit} leaves none for "
                "the completion: raise it, or shorten the prompt"
            )
        return remaining

    def stream(
        self, request: "GenerationRequest"
    ) -> Generator[tuple[str, "Completion | None"], None, None]:
        """One completion as text deltas, the last with the completion. Raises UserError if the
        request cannot be served.
        """
        progress.start("compiling and generating" if self.is_first else "generating")
        self.is_first = False
        for text_delta, completion in self.llm.stream_completion(request):
            if completion is not None and completion.error:
                raise UserError(completion.error)
            yield text_delta, completion


def resolve_named_model(usage: str, file: str | None, overrides: Sequence[str]) -> ResolvedModel:
    """As `resolve_model`, for the model that FILE and key=value arguments name. Raises ConfigError
    if they name none, with the `usage` of the command.
    """
    return resolve_model(model_path(usage, file, overrides), file, overrides)


def model_path(usage: str, file: str | None, overrides: Sequence[str]) -> str:
    """A folder, a name on the Hub, or the name of a model, which has random weights."""
    layer = sources.from_overrides(overrides)
    for key in ("load_parameters_path", "model_name"):
        value = peek_setting(key, file, layer, os.environ)
        if value not in (None, "", "default"):
            return str(value)
    from maxtext.models.configuration import load

    load(file, layer)  # a misspelt key is reported first
    raise ConfigError(
        f"which model? {usage}, where MODEL is a Hugging Face folder, org/name of "
        "its Hub, a converted checkpoint or a run's folder (load_parameters_path=DIR); the name "
        "of a model has random weights"
    )


def resolve_model(path: str, file: str | None, args: Sequence[str]) -> ResolvedModel:
    """Open the model folder (or take the model of that name) and resolve its configuration from
    FILE and key=value arguments.
    """
    overrides = sources.from_overrides(args)
    processes.limit_gpu_memory(process_settings(file, overrides).gpu_memory_utilization)
    checkpoint = None
    folder = find_folder(path, peek_setting("hf_access_token", file, overrides, os.environ))
    if folder.is_dir():
        from maxtext.checkpoint.open import open_checkpoint

        checkpoint = open_checkpoint(folder)
    elif path in fields.choices("model_name"):
        model_name = peek_setting("model_name", file, overrides, os.environ)
        if model_name not in (None, path):
            raise ConfigError(f"which of the two, {path} or model_name={model_name}? leave one out")
        if model_name is None:
            overrides["model_name"] = Setting(path, Source("command line"))
    else:
        hint = sources.suggest(path, fields.choices("model_name"))
        raise ConfigError(f"{path!r} is neither a folder nor the name of a model{hint}")
    from maxtext.inference.loading import resolve_config

    config = resolve_config(overrides, checkpoint, file)
    ledger.refuse_unsupported_model(config, base_values())
    reserved = config.max_prefill_predict_length
    is_set = config.source("max_prefill_predict_length").is_user
    if is_set and reserved >= config.max_target_length:
        raise ConfigError(
            f"max_prefill_predict_length={reserved} leaves nothing of max_target_length="
            f"{config.max_target_length} for the completion: raise max_target_length"
        )
    return ResolvedModel(path, config, checkpoint)


def load_session(
    model: ResolvedModel,
    text: bool = True,
    adapters: Mapping[str, str] | None = None,
    log_level: int = logging.WARNING,
) -> GenerationSession:
    """Load the weights and, unless `text` is false, the tokenizer of a model. `adapters` are
    folders by name, by default those at lora_input_adapters_path.
    """
    start = time.perf_counter()
    log.configure(level=log_level)
    from maxtext.inference import LLM
    from maxtext.tokenizers import load_tokenizer

    if model.checkpoint is None:
        note(f"{model.path} is a name, not a checkpoint: its weights are random, so is its text")
    with loading_status(model.path) as report:
        llm = LLM.from_config(model.config, model.checkpoint, report, adapters=adapters)
    if text and model.config.tokenizer_path and llm.tokenizer is None:
        llm.tokenizer = load_tokenizer(model.config)
    return GenerationSession(llm, model.config, model.path, time.perf_counter() - start)


@contextlib.contextmanager
def loading_status(path: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A status line on a terminal, which disappears at the end; nothing elsewhere."""
    progress.stop()
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"loading {path}") as status:
        yield lambda done, total, name: status.update(f"loading {path}: {done / max(total, 1):.0%}")


def refuse_useless(config: MaxTextConfig, command: str, reasons: Mapping[str, str]) -> None:
    """Raise ConfigError for keys of other commands that would do nothing in this one."""
    problems = [
        f"{key}={ledger.shown(getattr(config, key))} ({config.source(key)}) would do nothing in "
        f"`maxtext {command}`: {reason}"
        for key, reason in reasons.items()
        if config.source(key).is_user and getattr(config, key) != getattr(base_values(), key)
    ]
    if problems:
        raise ConfigError(*problems)


def supports_style(stream: TextIO) -> bool:
    """Whether the stream is a terminal with colours."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def dim(text: str, stream: TextIO) -> str:
    return f"{DIM}{text}{PLAIN}" if supports_style(stream) else text


def note(text: str) -> None:
    """A line on standard error, dimmed: it is not part of what the model generates."""
    log.print_status(dim(text, sys.stderr))


def write(text: str, style: str = "") -> None:
    """Write to standard output at once. On a terminal, control characters that a model generates
    become U+FFFD.
    """
    out = sys.stdout
    if out.isatty():
        text = "".join(
            c if (c >= " " and not "\x7f" <= c < "\xa0") or c in "\n\t" else "\ufffd" for c in text
        )
    if style and supports_style(out):
        text = f"{style}{text}{PLAIN}"
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, errors="replace").decode(encoding))
    out.flush()
