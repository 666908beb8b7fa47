"""Render conversations to text by a Jinja chat template, in the environment of transformers.

That environment is a sandbox with trimmed blocks, `break` and `continue`, `raise_exception(text)`,
`strftime_now(format)`, a `tojson` that does not escape Unicode, and `{% generation %}` around the
model's turns, which changes no text. A template sees `messages`, `add_generation_prompt`, `tools`
and `documents` (None unless given), the special tokens by name (bos_token, eos_token …), and what
the caller adds.

A template is a program that came with a model. It runs in its own process, with limits on time and
memory (`template_process.py`), so that a faulty or hostile template becomes a one-line error.

The rendered text contains special tokens, including BOS where the template writes it: encode it
with `encode_with_specials`.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.tokenizers.interface import (
    ChatTemplateSource,
    Tokenizer,
    chat_template_entry,
    read_json,
)
from maxtext.tokenizers.template_process import RenderedTemplate, TemplateFailure, run_template

Messages = Sequence[Mapping[str, object]]
# Names of a message's reasoning, which rows and templates choose differently
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Variables of a template that neither requests nor the settings of a server may set, special tokens
# also where the tokenizer has none of this kind.
RESERVED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "self"}
RESERVED_VARIABLES |= {
    f"{kind}_token" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
}
# The content of a message, or its end, to find where a template writes it. No text contains this
# random number, and a template that changes the case of texts does not change it.
CONTENT_MARK = f"@{secrets.randbits(128)}@"


class TemplateRefusal(UserError):
    """A conversation that a template cannot render. The message shows it; `reason` does not."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class ChatTemplate:
    """`origin`: where the template comes from, for error messages. `tool_use`: the template of
    conversations with tools, if it is another.
    """

    source: str
    origin: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_use: str | None = None

    def __post_init__(self) -> None:
        for source in self.sources:
            try:
                run_template(source, [])
            except TemplateFailure as error:
                line = f", line {error.line}" if error.line else ""
                raise ConfigError(
                    f"the chat template of {self.origin}{line} is not valid Jinja: {error}"
                ) from error

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if self.tool_use is None else (self.source, self.tool_use)

    def source_for(self, variables: Mapping[str, object] | None) -> str:
        """The Jinja text of conversations with these variables."""
        has_tools = (variables or {}).get("tools") is not None
        return self.source if self.tool_use is None or not has_tools else self.tool_use

    def marks_generation(self, variables: Mapping[str, object] | None = None) -> bool:
        """Whether the template marks the model's turns with `{% generation %}`."""
        return GENERATION_TAG.search(self.source_for(variables)) is not None

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as text; with `add_generation_prompt`, followed by the header of the
        model's turn. `variables` (tools, enable_thinking …) are added to those of the template.
        """
        (rendered,) = self.run([(messages, add_generation_prompt)], variables)
        if isinstance(rendered, UserError):
            raise rendered
        return rendered.text

    def render_open(self, messages: Messages, variables: Mapping[str, object] | None = None) -> str:
        """The conversation up to the end of the content of its last message, which the model
        continues, as transformers' `continue_final_message`. Raises UserError if there is none.
        """
        *earlier, last = messages
        content = last.get("content")
        if not isinstance(content, str):
            raise UserError("the last message has no content to continue")
        marked = {**last, "content": f"{content}{CONTENT_MARK} "}
        text, mark, rest = self.render([*earlier, marked], False, variables).rpartition(
            CONTENT_MARK
        )
        if not mark:
            reason = "it leaves out the last message"
            raise TemplateRefusal(f"the chat template of {self.origin}: {reason}", reason)
        return text if rest.startswith(" ") else text.rstrip()  # the template strips contents

    def run(
        self,
        conversations: Sequence[tuple[Messages, bool]],
        variables: Mapping[str, object] | None = None,
        wants_spans: bool = False,
    ) -> list[RenderedTemplate | UserError]:
        """Render several (messages, add_generation_prompt), with `wants_spans` also the spans of
        `{% generation %}` blocks. A UserError stands for those that the template refuses.

        Raises UserError if the template cannot be run, or a conversation is not one.
        """
        common: Json = {
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **to_builtins(variables or {}),
        }
        variable_sets = [
            common | {"messages": to_records(messages), "add_generation_prompt": is_prompt}
            for messages, is_prompt in conversations
        ]
        try:
            rendered = run_template(self.source_for(variables), variable_sets, wants_spans)
        except TemplateFailure as error:
            raise self.refusal(conversations[0][0], error) from error
        return [
            self.refusal(messages, result) if isinstance(result, TemplateFailure) else result
            for (messages, _), result in zip(conversations, rendered, strict=True)
        ]

    def refusal(self, messages: Messages, error: TemplateFailure) -> UserError:
        return TemplateRefusal(
            f"the chat template of {self.origin} refuses {short_repr(messages)}: {error}",
            reason=str(error),
        )


def chat_template(
    config: MaxTextConfig, tokenizer: Tokenizer, may_be_prompt: bool = False
) -> ChatTemplate | None:
    """The template of the configuration, else the tokenizer's own, else None. `chat_template` may
    be the name of one of several templates of the tokenizer. `may_be_prompt`: the file at
    chat_template_path may have a template of prompts instead (`PromptTemplate`).

    Raises ConfigError if there is none and `use_chat_template` is set.
    """
    templates, origin = tokenizer.chat_template, tokenizer.name
    name = None
    if isinstance(templates, Mapping) and config.chat_template in templates:
        name = config.chat_template
    elif config.chat_template:
        templates, origin = config.chat_template, "chat_template"
    elif config.chat_template_path:
        template = read_template(Path(config.chat_template_path).expanduser(), may_be_prompt)
        if template is not None:
            templates, origin = template, config.chat_template_path
    if templates is not None:
        source, tool_use = select_templates(templates, origin, name)
        return ChatTemplate(source, origin, tokenizer.special_tokens, tool_use)
    if config.use_chat_template:
        raise ConfigError(
            f"use_chat_template=true, but the tokenizer {tokenizer.name} has no chat template: "
            "set chat_template_path or chat_template"
        )
    return None


def select_templates(
    templates: str | Mapping[str, str], origin: str, name: str | None
) -> tuple[str, str | None]:
    """(source, tool_use) of a `ChatTemplate`, as transformers chooses among several templates: the
    one called `name`, else `default`, and `tool_use` for conversations with tools.
    """
    if isinstance(templates, str):
        return templates, None
    if name is not None:
        return templates[name], None
    if "default" not in templates:
        raise ConfigError(
            f"{origin} has the chat templates {', '.join(sorted(templates))}, and none is called "
            f"default: choose one, for example with chat_template={min(templates)}"
        )
    return templates["default"], templates.get("tool_use")


def read_template(path: Path, may_be_prompt: bool = False) -> ChatTemplateSource:
    """A Jinja file, or a JSON file with an entry chat_template like tokenizer_config.json.
    None for a file with the entry TEMPLATE alone, if `may_be_prompt`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_path={path} cannot be read: {error}") from error
    if path.suffix != ".json":
        return text
    record = read_json(path)
    template = chat_template_entry(record)
    if template is None and not (may_be_prompt and "TEMPLATE" in record):
        raise ConfigError(f"chat_template_path={path} has no text under chat_template")
    return template


def to_records(messages: Messages) -> list[Json]:
    """The messages as builtin types, as transformers gives them to a template: without the fields
    that are null, and with reasoning under the two names that templates read. Raises UserError if
    they are no list of records.
    """
    records = to_builtins(messages)
    if not isinstance(records, list) or not all(isinstance(entry, dict) for entry in records):
        raise UserError(
            f"a conversation is a list of records with role and content, not {short_repr(messages)}"
        )
    return [with_reasoning(without_nulls(record)) for record in records]


def without_nulls(message: Mapping[str, object]) -> Json:
    """The fields that have a value. A template would write the word None for `content: null`."""
    return {name: value for name, value in message.items() if value is not None}


def with_reasoning(message: Json) -> Json:
    """The message with its reasoning, if it has any, as `reasoning_content` and, for templates of
    gpt-oss, as `thinking`.
    """
    reasoning = next(
        (message[name] for name in REASONING_FIELDS if message.get(name) is not None), None
    )
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def to_builtins(value: object) -> Any:
    """Convert mappings, tuples and arrays to the dicts and lists that templates test for."""
    if isinstance(value, Mapping):
        return {str(key): to_builtins(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [to_builtins(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
