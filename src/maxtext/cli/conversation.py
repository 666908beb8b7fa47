"""Conversations with a model here, or with a server that has OpenAI's API: messages, and replies as
deltas.
"""

import abc
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace

from maxtext.cli.arguments import Arguments
from maxtext.cli.generation import GenerationSession, note
from maxtext.cli.positionals import split_overrides
from maxtext.common import progress
from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.diagnostics.load.client import Target
from maxtext.inference.api_client import CONTEXT_LENGTH_EXCEEDED, ApiClient, ServerError


@dataclass(frozen=True)
class ReplyEnd:
    """How a reply ended."""

    num_tokens: int | None = None  # None: unknown
    remark: str = ""  # a sentence, if it was cut


@dataclass(frozen=True)
class ReplyDelta:
    """A part of a reply. `reasoning` is not part of the conversation."""

    text: str = ""
    reasoning: str = ""
    end: ReplyEnd | None = None  # of the last delta of a complete reply


Deltas = Generator[ReplyDelta, None, None]
# Fields that a conversation with a server sets itself.
OWN_FIELDS = {"model", "messages", "stream", "stream_options", "n", "tools"}


class Conversation(abc.ABC):
    """The messages so far; the oldest are dropped where the model cannot take more."""

    def __init__(self, title: str):
        self.title = title  # of the model, for the first line
        self.system = ""
        self.messages: list[Mapping[str, object]] = []
        self.noted_truncation = False

    @abc.abstractmethod
    def stream(self) -> Deltas:
        """The reply to the last message. Raises UserError if there is none."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Called from another thread, or a signal handler, when a reply is not wanted any more."""

    def with_system(self, messages: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *messages]

    def note_truncation(self, limit: str) -> None:
        """Say once that messages were dropped."""
        if not self.noted_truncation:
            self.noted_truncation = True
            note(f"the conversation exceeds {limit}: its oldest messages are dropped")


class LocalConversation(Conversation):
    """With a model in this process, as many messages as fit in max_target_length."""

    def __init__(self, session: GenerationSession, title: str):
        from maxtext.inference import SamplingParams

        super().__init__(title)
        self.session = session
        self.params = SamplingParams.from_config(session.config)
        self.num_replies = 0
        _ = session.chat_template  # a model that cannot chat is refused before anything is typed

    def stream(self) -> Deltas:
        from maxtext.inference import GenerationRequest

        prompt_ids = self.truncated_prompt()
        params = replace(
            self.params,
            max_new_tokens=self.session.max_new_tokens(prompt_ids),
            seed=self.session.config.init_weights_seed + self.num_replies,
        )
        self.num_replies += 1
        for text, completion in self.session.stream(GenerationRequest(prompt_ids, params)):
            end = None
            if completion is not None:
                limit = self.session.config.max_target_length
                is_cut = completion.finish_reason == "length"
                remark = f"the reply ends at max_target_length={limit}" if is_cut else ""
                end = ReplyEnd(len(completion.token_ids), remark)
            yield ReplyDelta(text, end=end)

    def abort(self) -> None:
        """The engine finishes its step; then the generator is closed, which aborts the request."""

    def truncated_prompt(self) -> list[int]:
        """The ids of the conversation, without its oldest messages where it has become too long."""
        limit = self.session.config.max_target_length
        # A quarter of the sequence is left for the reply.
        max_prompt = self.session.reserved_prompt_tokens or limit - limit // 4
        messages = list(self.messages)
        while len(ids := self.encode(messages)) > max_prompt and len(messages) > 1:
            del messages[:2]
        self.session.max_new_tokens(ids)  # raises before messages are dropped for good
        if len(messages) < len(self.messages):
            self.note_truncation(f"max_target_length={limit}")
        self.messages = messages
        return ids

    def encode(self, messages: list[Mapping[str, object]]) -> list[int]:
        return self.session.encode_chat(self.with_system(messages))


def connect(arguments: Arguments) -> "ServerConversation":
    """A conversation with the server of `--server`. Raises ConfigError if it cannot be reached or
    has no such model.
    """
    url, model = arguments["--server"], arguments["--model"]
    fields = parse_fields(arguments.args)
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


def parse_fields(args: list[str]) -> Json:
    """key=value arguments as fields of requests; values are JSON, or else texts."""
    other_args, settings = split_overrides(args)
    other_args += [setting for setting in settings if not setting.partition("=")[0].isidentifier()]
    if other_args:
        raise ConfigError(
            f"unknown argument {other_args[0]!r}; with --server, fields of requests are written "
            "key=value, such as temperature=0.7"
        )
    fields: Json = {}
    for setting in settings:
        name, _, text = setting.partition("=")
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

    def __init__(self, client: ApiClient, model: str, fields: Mapping[str, object]):
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

    def stream_reply(self, messages: list[Mapping[str, object]]) -> Deltas:
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
    """The fields of a chunk that a chat uses."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None  # so far


def parse_chunk(event: Json) -> Chunk:
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


def text_of(value: object) -> str:
    return value if isinstance(value, str) else ""
