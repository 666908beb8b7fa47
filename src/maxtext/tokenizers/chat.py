"""Conversations to text by a chat template: Jinja, in the environment that templates are written for.

That is the one of transformers: a sandbox, blocks that leave no blank lines, `break` and `continue`,
`raise_exception(text)`, `strftime_now(format)`, `tojson` that keeps characters as they are, and `{% generation %}`
around what the model is to write, which changes nothing here. A template sees `messages`, `add_generation_prompt`,
`tools` and `documents` (none), and the special tokens by name (bos_token, eos_token …).

The text has special tokens in it, a beginning too where the template writes one: encode it by `encode_with_specials`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.tokenizers.beside import read_json, template_text
from maxtext.tokenizers.interface import Tokenizer

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """`place`: where the template came from, for messages."""

    source: str
    place: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import jinja2  # here, since only chat templates need it

        try:
            compiled(self.source)
        except jinja2.TemplateError as error:
            number = getattr(error, "lineno", None)
            line = f", line {number}" if number else ""
            raise ConfigError(f"the chat template of {self.place}{line} is not valid Jinja: {error}") from error

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """The conversation as text; with `add_generation_prompt`, up to where the model is to answer."""
        plain_messages = plain(messages)
        if not isinstance(plain_messages, list) or not all(isinstance(message, dict) for message in plain_messages):
            raise UserError(f"a conversation is a list of records with role and content, not {shown(messages)}")
        try:
            return compiled(self.source).render(
                messages=plain_messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program of its own: any type of error may come out of it
            raise UserError(f"the chat template of {self.place} refuses {shown(messages)}: {error}") from error


def chat_template(config: MaxTextConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Of the configuration, else the tokenizer's own; None where there is none and none is needed."""
    if config.chat_template:
        source, place = config.chat_template, "chat_template"
    elif config.chat_template_path:
        source, place = read_template(Path(config.chat_template_path).expanduser()), config.chat_template_path
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


@lru_cache(maxsize=16)
def compiled(source: str) -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def plain(value: Any) -> Any:
    """Records as files give them (mappings, tuples, arrays) as the dicts and lists that templates test for."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
