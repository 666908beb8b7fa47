"""`maxtext chat --server URL`: a conversation with a server that has OpenAI's API."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxtext.cli.arguments import Arguments
from maxtext.cli.conversation import Conversation, Deltas, ReplyDelta, ReplyEnd
from maxtext.common import progress
from maxtext.common.errors import ConfigError
from maxtext.diagnostics.load.client import Target
from maxtext.inference.api_client import CONTEXT_LENGTH_EXCEEDED, ApiClient, ServerError

# Fields that the conversation sets itself.
OWN_FIELDS = {"model", "messages", "stream", "stream_options", "n", "tools"}


def connect(arguments: Arguments) -> "ServerConversation":
    """A conversation with the server of `--server`. Raises ConfigError if it cannot be reached or
    has no such model.
    """
    url, model = arguments["--server"], arguments["--model"]
    fields = parse_fields(arguments.words)
    client = ApiClient(url, Target.from_url(url, arguments["--api-key"], option="--server"))
    try:
        names = client.model_names()
    except ServerError as error:
        # A gateway may have no list: then the name is taken as it is.
        if error.status not in (404, 405) or model is None:
            raise ConfigError(str(error)) from error
        names = [model]
    if not names:
        raise ConfigError(f"{url} serves no model")
    if model is not None and model not in names:
        raise ConfigError(f"{url} has no model {model!r}; it serves {', '.join(names[:20])}")
    return ServerConversation(client, model or names[0], fields)


def parse_fields(args: list[str]) -> dict[str, Any]:
    """key=value arguments as fields of requests; values are JSON, or else texts."""
    fields: dict[str, Any] = {}
    for arg in args:
        name, sign, text = arg.partition("=")
        if not sign or not name.isidentifier():
            raise ConfigError(
                f"unknown argument {arg!r}; with --server, fields of requests are written "
                "key=value, such as temperature=0.7"
            )
        if name in OWN_FIELDS:
            hint = "--model NAME" if name == "model" else "the conversation sets it"
            raise ConfigError(f"{name} cannot be a field here: {hint}")
        try:
            fields[name] = json.loads(text)
        except (ValueError, RecursionError):
            fields[name] = text
    return fields


class ServerConversation(Conversation):
    """The server has no state: every request has all messages. Where they exceed its maximum
    length, the oldest are dropped.
    """

    def __init__(self, client: ApiClient, model: str, fields: Mapping[str, Any]):
        super().__init__(f"{model} at {client.url}")
        self.client = client
        self.model = model
        self.fields = fields

    def abort(self) -> None:
        self.client.abort()

    def stream(self) -> Deltas:
        messages = list(self.messages)
        while True:
            try:
                for delta in self.stream_reply(messages):
                    if len(messages) < len(self.messages):
                        self.note_truncation("the server's maximum length")
                        self.messages = messages
                    yield delta
                return
            except ServerError as error:
                if error.code != CONTEXT_LENGTH_EXCEEDED or len(messages) < 3:
                    raise
                messages = messages[2:]

    def stream_reply(self, messages: list[Mapping[str, Any]]) -> Deltas:
        """The reply to these messages, which has at least one delta."""
        progress.start("waiting for the server")
        body = {**self.fields, "model": self.model, "messages": self.with_system(messages)}
        num_tokens: int | None = None
        remark = ""
        for event in self.client.stream_chat(body):
            chunk = parse_chunk(event)
            num_tokens = num_tokens if chunk.num_tokens is None else chunk.num_tokens
            if chunk.finish_reason == "length":
                remark = "the reply ends at the server's limit of tokens"
            if chunk.text or chunk.reasoning:
                yield ReplyDelta(chunk.text, chunk.reasoning)
        yield ReplyDelta(end=ReplyEnd(num_tokens, remark))


@dataclass(frozen=True)
class Chunk:
    """What a chat uses of a chunk."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None  # so far


def parse_chunk(event: Mapping[str, Any]) -> Chunk:
    """Raises ServerError if the event is no chunk of a chat completion."""
    try:
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        return Chunk(
            text=text_of(delta.get("content")),
            reasoning=text_of(delta.get("reasoning_content") or delta.get("reasoning")),
            finish_reason=choice.get("finish_reason"),
            num_tokens=(event.get("usage") or {}).get("completion_tokens"),
        )
    except (AttributeError, LookupError, TypeError) as error:
        raise ServerError("the server sent an event that is no chunk of a chat") from error


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""
