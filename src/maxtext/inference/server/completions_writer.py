"""The response to /v1/completions and /v1/chat/completions, whole or as chunks of a stream."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from maxtext.inference.logprobs import TokenLogprobs
from maxtext.inference.requests import Completion, CompletionDelta
from maxtext.inference.server.active_request import ActiveRequest
from maxtext.inference.server.choices import ChoiceFormatter, Json, Usage
from maxtext.inference.server.events import DONE, encode_event, encode_json
from maxtext.inference.server.ids import new_id
from maxtext.inference.server.model import ServedModel
from maxtext.inference.server.request_parser import ApiRequest

PromptLogprobs = Sequence[TokenLogprobs | None]


class CompletionsWriter:
    """Writes the response to one request of /v1/completions or /v1/chat/completions."""

    def __init__(self, model: ServedModel, request: ApiRequest, active: ActiveRequest):
        self.model = model
        self.request = request
        self.active = active
        prompts = [stream.prompt_ids for stream in active.streams]
        count = request.num_choices
        self.formatters = [
            ChoiceFormatter(model, request, index, prompts[index // count])
            for index in range(len(prompts) * count)
        ]
        has_reasoning = request.is_chat and model.reasoning_parser != "none"
        self.usage = Usage(sum(map(len, prompts)), reasoning_tokens=0 if has_reasoning else None)
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}  # by prompt
        # Deltas of other choices that came before the log-probabilities of their prompt.
        self.waiting: dict[int, list[CompletionDelta]] = {}
        kind, prefix = (
            ("chat.completion", "chatcmpl")
            if request.is_chat
            else (
                "text_completion",
                "cmpl",
            )
        )
        self.head: Json = {
            "id": f"{prefix}-{new_id()}",
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }

    async def whole(self) -> Json:
        """The response without a stream."""
        completions: dict[int, Completion] = {}
        async with aclosing(self.active.deltas()) as deltas:
            async for prompt, delta in deltas:
                if delta.completion is not None:
                    self.add_usage(delta.completion)
                    self.usage.completion_tokens += len(delta.completion.token_ids)
                    index = prompt * self.request.num_choices + delta.choice
                    completions[index] = delta.completion
        choices = []
        extras: Json = {}  # of a chat, which has one prompt
        for index, formatter in enumerate(self.formatters):
            first = completions[index - index % self.request.num_choices]
            choices.append(formatter.choice(completions[index], first.prompt_logprobs))
            if self.request.prompt_logprobs is not None:
                records = {"prompt_logprobs": formatter.prompt_records(first.prompt_logprobs)}
                (extras if self.request.is_chat else choices[-1]).update(records)
        return {**self.head, "choices": choices, "usage": self.usage.to_json(), **extras}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events, one write for what a step of the engine adds."""
        if self.request.is_chat:
            self.head["object"] = "chat.completion.chunk"
        self.encoded_head = encode_json(self.head)[:-1] + b',"choices":['  # of every chunk
        async with aclosing(self.active.deltas()) as deltas:
            async for prompt, delta in deltas:
                self.usage.completion_tokens += len(delta.token_ids)
                if delta.completion is not None:
                    self.add_usage(delta.completion)
                events = b"".join(map(self.encode_chunk, self.chunks(prompt, delta)))
                if events:
                    yield events
        last = b""
        if self.request.include_usage:
            last = encode_event({**self.head, "choices": [], "usage": self.usage.to_json()})
        yield last + DONE

    def add_usage(self, completion: Completion) -> None:
        self.usage.add(completion)
        if self.usage.reasoning_tokens is not None:
            self.usage.reasoning_tokens += self.request.format.reasoning.count_tokens(
                completion.token_ids, self.model.tokenizer
            )

    def chunks(self, prompt: int, delta: CompletionDelta) -> list[Json]:
        """The choices of chunks that can be sent after a delta."""
        first_index = prompt * self.request.num_choices
        if not self.request.echoes or self.request.logprobs is None:
            return self.formatters[first_index + delta.choice].chunks(delta, ())
        ready = [*self.waiting.pop(prompt, ()), delta]
        if delta.prompt_logprobs:
            self.prompt_logprobs[prompt] = delta.prompt_logprobs
        if prompt not in self.prompt_logprobs:
            self.waiting[prompt] = ready
            return []
        logprobs = self.prompt_logprobs[prompt]
        return [
            chunk
            for each in ready
            for chunk in self.formatters[first_index + each.choice].chunks(each, logprobs)
        ]

    def encode_chunk(self, choice: Json) -> bytes:
        parts = [b"data: ", self.encoded_head, encode_json(choice), b"]"]
        if self.request.include_usage:
            usage = self.usage.to_json() if self.request.continuous_usage else None
            parts += [b',"usage":', encode_json(usage)]
        return b"".join([*parts, b"}\n\n"])
