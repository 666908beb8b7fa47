"""The forms of rows for fine-tuning, recognised by their columns, and remarks on such rows.

| columns | form |
|---|---|
| messages, or conversations | Conversation; {from, value} is read as {role, content} |
| prompt, completion | PromptCompletion if texts, a Conversation if messages |
| instruction, input (optional), output | Conversation of user and assistant |
| question, answer | Conversation of user and assistant |
| text | TextRow |
| prompt (optional), chosen, rejected | PreferenceTexts or PreferenceChats |
| prompt, messages, question or problem, and any others | Prompt of reinforcement learning |

The columns tools and chat_template_kwargs next to a conversation are variables of its template. A
column without a value (null) counts as absent. Lists and objects may be JSON text, as in files that
hold only text.

`RowReports` counts and logs remarks: rows without a token to train on and pairs that truncation
makes equal, which are dropped, system messages that are not first, turns whose end is not trained
on, and truncation.
"""

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from maxtext.common.log import LOGGER
from maxtext.common.trees import common_prefix_length
from maxtext.common.types import Json
from maxtext.input_pipeline.formats import Record, UnusableRecord
from maxtext.tokenizers.chat import without_nulls

Message = Json
T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "document")
# Values of `from` -> roles
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
# Required columns of each form of a row, the first that fits is taken
ROW_FORMS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
    ("text",),
)
PAIR_FORMS = (("chosen", "rejected"),)
PROMPT_FORMS = (("prompt",), ("messages",), ("question",), ("problem",))
OPTIONAL = ("input", "prompt")
VARIABLES = ("tools", "chat_template_kwargs")


@dataclass(frozen=True)
class TextRow:
    text: str


@dataclass(frozen=True)
class PromptCompletion:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """`first_turn` is the index of the first message that may be trained on; `variables` are those
    of the template.
    """

    messages: list[Message]
    first_turn: int = 0
    variables: Json = field(default_factory=dict)


@dataclass(frozen=True)
class PreferenceTexts:
    """If `prompt` is None, it is the common start of `chosen` and `rejected`."""

    prompt: str | None
    chosen: str
    rejected: str


@dataclass(frozen=True)
class PreferenceChats:
    """The completions `chosen` and `rejected` are messages that follow those of `prompt`."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    variables: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A text, or messages that the model is to answer."""

    prompt: str | list[Message]
    variables: Json = field(default_factory=dict)


def parse_row(
    record: Record, columns: Sequence[str] | None
) -> TextRow | PromptCompletion | Conversation:
    """A record in one of the forms for supervised fine-tuning. `columns`: the names that the user
    set, or None. Raises UnusableRecord.
    """
    row = named_columns(record, columns, ROW_FORMS)
    form = form_of(row, ROW_FORMS)
    variables = template_variables(row)
    if form == ("text",):
        return TextRow(text_of(row, "text"))
    if form in (("messages",), ("conversations",)):
        return Conversation(messages_of(row, form[0]), variables=variables)
    if form == ("prompt", "completion"):
        prompt, completion = (text_or_messages(row, column) for column in form)
        if isinstance(prompt, str) and isinstance(completion, str):
            return PromptCompletion(prompt, not_empty("completion", completion))
        if isinstance(prompt, str) or isinstance(completion, str):
            raise UnusableRecord("prompt and completion are a text and messages: use one kind")
        return Conversation(prompt + not_empty("completion", completion), len(prompt), variables)
    question, answer = (text_of(row, column) for column in form)
    if row.get("input") not in (None, "") and form[0] == "instruction":
        question = f"{question}\n\n{text_of(row, 'input')}"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": not_empty(form[1], answer)},
    ]
    return Conversation(messages, variables=variables)


def parse_pair(record: Record, columns: Sequence[str] | None) -> PreferenceTexts | PreferenceChats:
    """A record with a preferred and a rejected completion. Raises UnusableRecord."""
    row = named_columns(record, columns, PAIR_FORMS)
    form_of(row, PAIR_FORMS)
    chosen, rejected = (
        not_empty(column, text_or_messages(row, column)) for column in ("chosen", "rejected")
    )
    prompt = text_or_messages(row, "prompt") if "prompt" in row else None
    if isinstance(chosen, str) and isinstance(rejected, str):
        if isinstance(prompt, list):
            raise UnusableRecord("prompt has messages, but chosen and rejected are texts")
        return PreferenceTexts(prompt, chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise UnusableRecord("chosen and rejected are a text and messages: use one kind")
    # A prompt that is a text is that of the first message, which both completions repeat.
    if not isinstance(prompt, list) or chosen[: len(prompt)] == rejected[: len(prompt)] == prompt:
        shared = common_prefix_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not side:
            raise UnusableRecord(f"{name} has no message after the common prompt")
    return PreferenceChats(prompt, chosen, rejected, template_variables(row))


def parse_prompt(record: Record, columns: Sequence[str] | None) -> Prompt:
    """The prompt of a record. Messages end before the last answer of the assistant; a question is
    a message of the user. Raises UnusableRecord.
    """
    row = named_columns(record, columns, PROMPT_FORMS)
    (column,) = form_of(row, PROMPT_FORMS)
    variables = template_variables(row)
    if column in ("question", "problem"):
        message = {"role": "user", "content": not_empty(column, text_of(row, column))}
        return Prompt([message], variables)
    prompt = not_empty(column, text_or_messages(row, column))
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        prompt = not_empty(column, prompt[:-1])
    if isinstance(prompt, list):
        refuse_media(prompt)
    return Prompt(prompt, variables)


def refuse_media(messages: Sequence[Message]) -> None:
    """Raise UnusableRecord for a message with an image, a video or audio: completions are sampled
    from prompts of text."""
    for index, message in enumerate(messages):
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in (None, "text"):
                raise UnusableRecord(
                    f"message {index} has a part of type {kind!r}: completions are "
                    "sampled from text alone"
                )


def named_columns(
    record: Record, columns: Sequence[str] | None, forms: Sequence[tuple[str, ...]]
) -> Record:
    """The columns that have a value; with `columns` only these, and those of the template's
    variables. One or two columns with other names than those of a form are a conversation or text,
    or prompt and completion.
    """
    row = {name: to_text(value) for name, value in record.items() if value is not None}
    if columns is None:
        return row
    missing = [name for name in columns if name not in row and name not in OPTIONAL]
    if missing:
        state = "is null" if missing[0] in record else "is missing"
        raise UnusableRecord(f"the column {missing[0]!r} {state}; there are {listed(record)}")
    variables = {name: row[name] for name in VARIABLES if name in row}
    row = {name: row[name] for name in columns if name in row}
    if not has_form(columns, forms):
        names = dict(zip(columns, other_names(columns, row, forms), strict=True))
        row = {names[name]: value for name, value in row.items()}
    return row | variables


def has_form(columns: Sequence[str], forms: Sequence[tuple[str, ...]]) -> bool:
    return any(set(form) <= set(columns) for form in forms)


def other_names(
    columns: Sequence[str], row: Record, forms: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """The columns of a form that columns with names of the user's own stand for."""
    if forms is PROMPT_FORMS:
        return ("prompt",)
    if forms is PAIR_FORMS:
        return ("prompt", "chosen", "rejected")[-len(columns) :]
    if len(columns) == 2:
        return ("prompt", "completion")
    value = parse_messages(row[columns[0]])
    return ("text",) if isinstance(value, str) else ("messages",)


def form_of(row: Record, forms: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    form = next((form for form in forms if all(name in row for name in form)), None)
    if form is None:
        raise UnusableRecord(no_form(row, forms))
    return form


def no_form(columns: Iterable[str], forms: Sequence[tuple[str, ...]]) -> str:
    wanted = "; or ".join(", ".join(form) for form in forms)
    return (
        f"the columns {listed(columns)} are no form of a row: expected {wanted}; name others in "
        "train_data_columns, or convert rows with formatting_func_path"
    )


def listed(columns: Iterable[str]) -> str:
    return ", ".join(map(str, columns)) or "none"


def to_text(value: object) -> object:
    """Decode bytes, which columns of tf.train.Example have."""
    try:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, list) and value and all(isinstance(item, bytes) for item in value):
            return [item.decode() for item in value]
    except UnicodeDecodeError as error:
        raise UnusableRecord(f"a column has invalid UTF-8 at byte {error.start}") from error
    return value


def text_of(row: Record, column: str) -> str:
    if not isinstance(row[column], str):
        raise UnusableRecord(
            f"column {column} has a value of type {type(row[column]).__name__} instead of text"
        )
    return row[column]


def not_empty(column: str, value: T) -> T:
    if not value:
        raise UnusableRecord(f"column {column} is empty")
    return value


def text_or_messages(row: Record, column: str) -> str | list[Message]:
    value = parse_messages(row[column])
    return value if isinstance(value, str) else to_messages(value, column)


def messages_of(row: Record, column: str) -> list[Message]:
    value = row[column]
    return to_messages(parse_json(value, column) if isinstance(value, str) else value, column)


def parse_messages(value: object) -> object:
    """The messages of a JSON text, or the value itself if it is something else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        if parsed and all(
            isinstance(item, dict) and {"role", "from"} & set(item) for item in parsed
        ):
            return parsed
    return value


def parse_json(text: str, column: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRecord(f"column {column} is text that is not JSON: {error}") from error


def to_messages(value: object, column: str) -> list[Message]:
    """Messages with role and content. Fields without a value, which tables add, are removed."""
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list | tuple | np.ndarray) or not all(
        isinstance(item, dict) for item in value
    ):
        raise UnusableRecord(
            f"column {column} has a value of type {type(value).__name__} instead of a list of "
            "messages"
        )
    return [to_message(item, index, column) for index, item in enumerate(value)]


def to_message(item: Json, index: int, column: str) -> Message:
    where = f"message {index} of column {column}"
    if item.get("role") is None and "from" in item:
        role = SPEAKERS.get(item["from"])
        message = {"role": role, "content": item.get("value")}
        if role is None:
            raise UnusableRecord(
                f"{where} is from {item['from']!r}: expected {', '.join(SPEAKERS)}"
            )
    else:
        message = without_nulls(item)
        if message.get("role") not in ROLES:
            raise UnusableRecord(
                f"{where} has the role {message.get('role')!r}: expected {', '.join(ROLES)}"
            )
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        kind = "no content" if content is None else f"content of type {type(content).__name__}"
        raise UnusableRecord(f"{where} has {kind}")
    return message


def template_variables(row: Record) -> Json:
    """The variables of the template that a row has."""
    tools = parse_column(row, "tools", list, "a list")
    variables = parse_column(row, "chat_template_kwargs", dict, "a JSON object") or {}
    named = {name: value for name, value in variables.items() if value is not None}
    return named | ({} if tools is None else {"tools": tools})


def parse_column(row: Record, column: str, kind: type, wanted: str) -> Any:
    """The list or dict of a column, which may be JSON text. None if the column has no value."""
    value = row.get(column)
    if isinstance(value, str):
        value = parse_json(value, column) if value.strip() else None
    if isinstance(value, tuple | np.ndarray):
        value = list(value)
    if value is not None and not isinstance(value, kind):
        raise UnusableRecord(
            f"column {column} has a value of type {type(value).__name__} instead of {wanted}"
        )
    return value


class Remark(Enum):
    """Remarks on rows, reported with a count and the first example: "rows that …"."""

    NOT_TRAINED_ON = "are dropped, since no token is trained on"
    SYSTEM_NOT_FIRST = "have a system message that is not the first message"
    END_NOT_TRAINED_ON = (
        "have no end-of-turn token that is trained on, so that a model does not learn to stop"
    )
    TRUNCATED = "are truncated to max_target_length"
    CUT_EQUAL = "are dropped, since truncation to max_target_length makes chosen and rejected equal"
    PROMPT_TOO_LONG = "are dropped, since their prompt is longer than max_prefill_predict_length"
    PROMPT_TRUNCATED = "have a prompt whose start is cut off"


@dataclass
class RemarkCount:
    """`example` is the location of the first row; `seen` are hashes of all locations."""

    example: str
    seen: set[int] = field(default_factory=set)


class RowReports:
    """The remarks on the rows that a process has encoded. A row counts once, however often it is
    read. Thread-safe.
    """

    def __init__(self) -> None:
        self.counts: dict[Remark, RemarkCount] = {}
        self.lock = threading.Lock()

    def add(self, remarks: Iterable[Remark], path: str, location: str | int) -> None:
        location = f"record {location}" if isinstance(location, int) else location
        for remark in remarks:
            with self.lock:
                entry = self.counts.setdefault(remark, RemarkCount(f"{path}, {location}"))
                before = len(entry.seen)
                entry.seen.add(hash((path, location)))
                count = len(entry.seen)
            if count > before and count & (count - 1) == 0:
                LOGGER.warning(
                    "rows that %s: %d so far, first %s", remark.value, count, entry.example
                )

    def summary(self) -> dict[str, tuple[int, str]]:
        """The count and the first example of each remark."""
        with self.lock:
            return {
                remark.value: (len(entry.seen), entry.example)
                for remark, entry in self.counts.items()
            }
