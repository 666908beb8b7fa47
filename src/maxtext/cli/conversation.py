"""A conversation with a model: its messages, and the replies to them as deltas."""

import abc
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from maxtext.cli.generation import GenerationSession, note


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


class Conversation(abc.ABC):
    """The messages so far; the oldest are dropped where the model cannot take more."""

    def __init__(self, title: str):
        self.title = title  # of the model, for the first line
        self.system = ""
        self.messages: list[Mapping[str, Any]] = []
        self.noted_truncation = False

    @abc.abstractmethod
    def stream(self) -> Deltas:
        """The reply to the last message. Raises UserError if there is none."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Called from another thread, or a signal handler, when a reply is not wanted any more."""

    def with_system(self, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
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

    def encode(self, messages: list[Mapping[str, Any]]) -> list[int]:
        return self.session.encode_chat(self.with_system(messages))
