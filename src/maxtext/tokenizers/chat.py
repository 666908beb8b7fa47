"""Conversations to text by a chat template: Jinja, in the environment that templates are written
for.

That is the one of transformers: a sandbox, blocks that leave no blank lines, `break` and
`continue`, `raise_exception(text)`, `strftime_now(format)`, `tojson` that keeps characters as they
are, and `{% generation %}` around what the model is to write, which changes nothing here. A
template sees `messages`, `add_generation_prompt`, `tools` and `documents` (none), and the special
tokens by name (bos_token, eos_token …).

A template is a program that came with a model: it runs in a process of its own, with limits on time
and memory (`templates.py`), so that a faulty or hostile one ends in one sentence.

The text has special tokens in it, a beginning too where the template writes one: encode it by
`encode_with_specials`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.tokenizers.beside import read_json, template_text
from maxtext.tokenizers.interface import Tokenizer
from maxtext.tokenizers.templates import TemplateFailure, run_template

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """`place`: where the template came from, for messages."""

    source: str
    place: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            run_template(self.source, None)
        except TemplateFailure as error:
            line = f", line {error.line}" if error.line else ""
            raise ConfigError(
                f"the chat template of {self.place}{line} is not valid Jinja: {error}"
            ) from error

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """The conversation as text; with `add_generation_prompt`, up to where the model is to
        answer.
        """
        plain_messages = plain(messages)
        if not isinstance(plain_messages, list) or not all(
            isinstance(message, dict) for message in plain_messages
        ):
            raise UserError(
                f"a conversation is a list of records with role and content, not {shown(messages)}"
            )
        variables: dict[str, Any] = {"messages": plain_messages, "tools": None, "documents": None}
        variables |= {"add_generation_prompt": add_generation_prompt, **self.special_tokens}
        try:
            return run_template(self.source, variables)
        except TemplateFailure as error:
            raise UserError(
                f"the chat template of {self.place} refuses {shown(messages)}: {error}"
            ) from error


def chat_template(config: MaxTextConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Of the configuration, else the tokenizer's own; None where there is none and none is
    needed.
    """
    if config.chat_template:
        source, place = config.chat_template, "chat_template"
    elif config.chat_template_path:
        source, place = (
            read_template(Path(config.chat_template_path).expanduser()),
            config.chat_template_path,
        )
    elif tokenizer.chat_template is not None:
        source, place = tokenizer.chat_template, tokenizer.name
    elif config.use_chat_template:
        raise ConfigError(
            f"use_chat_template=true, but the tokenizer {tokenizer.name} came without a chat template: set "
            "chat_template_path or chat_template"
        )
    else:
        return None
    return ChatTemplate(source, place, tokenizer.special_tokens)


def read_template(path: Path) -> str:
    """Jinja text, or a JSON object with an entry chat_template as tokenizer_config.json has it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_path={path} cannot be read: {error}") from error
    if path.suffix != ".json":
        return text
    found = template_text(read_json(path))
    if found is None:
        raise ConfigError(f"chat_template_path={path} has no text under chat_template")
    return found


def plain(value: Any) -> Any:
    """Records as files give them (mappings, tuples, arrays) as the dicts and lists that templates
    test for.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
