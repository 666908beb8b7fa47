"""The response to /v1/completions and /v1/chat/completions, whole or as chunks of a stream.

`ChoiceFormatter` turns what the engine adds to a choice into its parts of a response.
"""

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from maxtext.common.trees import common_prefix_length
from maxtext.common.types import Json
from maxtext.inference.requests import Completion, CompletionDelta
from maxtext.inference.sampling.grammar import FAILURE
from maxtext.inference.sampling.logprobs import TokenLogprobs
from maxtext.inference.server.errors import FINISH_REASONS, SERVER_ERROR, ApiError
from maxtext.inference.server.events import (
    DONE,
    ActiveRequest,
    encode_event,
    encode_json,
    encode_json_in_parts,
)
from maxtext.inference.server.model import ServedModel, new_id
from maxtext.inference.server.request_parser import ApiRequest
from maxtext.inference.text.detokenizer import REPLACEMENT
from maxtext.inference.text.parsers.message_parser import MessageDelta

MAX_CHARACTER_TOKENS = 8  # the most tokens of one character: it has four bytes at most
MAX_SHORT_LOGPROBS = 1000  # that take a moment (some 5 ms) to write
# Write more of them: the event loop goes on. Few, since they share the interpreter with it.
LOGPROB_THREADS = ThreadPoolExecutor(2, "maxtext-logprobs")
PromptLogprobs = Sequence[TokenLogprobs | None]


@dataclass
class Usage:
    """Tokens of a request. The tokens of a prompt are counted once, whatever its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None: the model has no reasoning

    def add(self, completion: Completion) -> None:
        if completion.choice == 0:
            self.cached_tokens += completion.num_cached_tokens

    def to_json(self) -> Json:
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class MessageBuilder:
    """A message as the API has it, from its deltas."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[Json] = []

    def add(self, delta: MessageDelta) -> Json:
        """The delta of a chunk."""
        if delta.reasoning:
            self.reasoning += delta.reasoning
            # Some clients read the first name, some the second.
            return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        if delta.index is None:
            self.content += delta.content
            return {"content": delta.content}
        if delta.name is None:
            self.calls[delta.index]["function"]["arguments"] += delta.arguments
            return {
                "tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]
            }
        function = {"name": delta.name, "arguments": delta.arguments}
        call = {"id": f"call_{new_id()[:24]}", "type": "function", "function": function}
        self.calls.append(call)
        return {"tool_calls": [{"index": delta.index, **call, "function": dict(function)}]}

    def message(self) -> Json:
        message: Json = {
            "role": "assistant",
            "content": self.content,
            "refusal": None,
        }
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        return message


class ChoiceFormatter:
    """Turns the deltas of one choice into its parts of a response. `echo` is the text of the
    prompt, where the response begins with it.
    """

    def __init__(self, model: ServedModel, request: ApiRequest, index: int, prompt: Sequence[int]):
        self.model = model
        self.request = request
        self.index = index
        self.prompt_ids = prompt
        self.echo = request.echoes[index // request.num_choices] if request.echoes else ""
        self.parser = request.format.build_parser()
        self.message = MessageBuilder()
        # Of text that the parser holds back.
        self.held_logprobs: list[Json] = []
        self.held_token_ids: list[int] = []
        self.is_first = True
        # Counts the characters before each token; a character ends with the last of its tokens.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_characters = 0
        # Whether the next tokens may complete a character of the prompt. If they do not, its
        # replacement character is part of the prompt's text.
        self.continues_character = False
        if request.logprobs is not None and not request.echoes:
            for token in prompt[-MAX_CHARACTER_TOKENS:]:
                self.decoder.decode(model.token_bytes(token, request.shows_specials))
            self.continues_character = bool(self.decoder.getstate()[0])

    def delta_logprobs(
        self, delta: CompletionDelta, prompt_logprobs: Sequence[TokenLogprobs | None]
    ) -> Json | None:
        """The log-probabilities of a delta; with `echo`, after those of the prompt."""
        if self.request.logprobs is None:
            return None
        if self.request.is_chat:
            records = zip(delta.token_ids, delta.logprobs, strict=True)
            return {"content": [self.chat_entry(*record) for record in records], "refusal": None}
        token_ids: list[int] = list(delta.token_ids)
        logprobs: list[TokenLogprobs | None] = list(delta.logprobs)
        if self.is_first and self.request.echoes:
            token_ids = [*self.prompt_ids, *token_ids]
            logprobs = [*prompt_logprobs, *logprobs]
        return self.completion_logprobs(token_ids, logprobs)

    def completion_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> Json:
        text = self.token_text
        offsets = []
        for token in token_ids:
            data = self.model.token_bytes(token, self.request.shows_specials)
            if data and not is_continuation(data[0]):  # what is incomplete before it stays so
                self.count_characters(self.decoder.decode(b"", final=True))
            offsets.append(self.num_characters)
            self.count_characters(self.decoder.decode(data))
        top = [
            # The token itself comes last: of equal texts, its number stays.
            entry
            and {text(each): entry.top[each] for each in (*drop(self.top(entry), token), token)}
            for token, entry in zip(token_ids, logprobs, strict=True)
        ]
        return {
            "tokens": [text(token) for token in token_ids],
            "token_logprobs": [entry and entry.logprob for entry in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def count_characters(self, text: str) -> None:
        """Add the characters of a text that follows those that are counted already."""
        if text and self.continues_character:
            self.continues_character = False
            text = text.removeprefix(REPLACEMENT)
        self.num_characters += len(text)

    def take_echo(self, token_ids: Sequence[int]) -> str:
        """The text of the prompt, before that of the first tokens: without a character that is
        incomplete in it, if they complete it.
        """
        decode = self.model.tokenizer.decode
        if not self.echo.endswith(REPLACEMENT) or decode(self.prompt_ids) != self.echo:
            return self.echo
        text = decode([*self.prompt_ids, *token_ids])
        return self.echo[: common_prefix_length(self.echo, text)]

    def chat_entry(self, token: int, record: TokenLogprobs) -> Json:
        return {
            **self.chat_token(token, record.logprob),
            "top_logprobs": [self.chat_token(each, record.top[each]) for each in self.top(record)],
        }

    def top(self, record: TokenLogprobs) -> list[int]:
        """The most likely tokens, as many as the request wants."""
        return list(record.top)[: self.request.logprobs]

    def token_text(self, token: int) -> str:
        """The name of a token in log-probabilities."""
        return f"token_id:{token}" if self.request.shows_token_ids else self.model.token_text(token)

    def prompt_records(self, logprobs: Sequence[TokenLogprobs | None]) -> list[Json | None]:
        """The field `prompt_logprobs`: for each token of the prompt but the first, the most likely
        tokens at its position and itself, by id.
        """
        records: list[Json | None] = []
        for token, record in zip(self.prompt_ids, logprobs, strict=True):
            if record is None:
                records.append(None)
                continue
            top = list(record.top)[: self.request.prompt_logprobs]
            ranks = {each: index + 1 for index, each in enumerate(top)} | {token: record.rank}
            records.append(
                {
                    str(each): {
                        "logprob": record.top[each],
                        "rank": rank,
                        "decoded_token": self.model.token_text(each),
                    }
                    for each, rank in ranks.items()
                }
            )
        return records

    def chat_token(self, token: int, logprob: float) -> Json:
        data = self.model.token_bytes(token, self.request.shows_specials)
        return {"token": self.token_text(token), "logprob": logprob, "bytes": list(data)}

    def extras(self, delta: CompletionDelta) -> Json:
        """Token ids, if the request wants them; those of the prompt in the first chunk."""
        if not self.request.return_token_ids:
            return {}
        extras: Json = {"token_ids": list(delta.token_ids)}
        if self.is_first and self.index % self.request.num_choices == 0:
            extras["prompt_token_ids"] = list(self.prompt_ids)
        return extras

    def choice(
        self, completion: Completion, prompt_logprobs: Sequence[TokenLogprobs | None]
    ) -> Json:
        """The choice of a whole response."""
        delta = CompletionDelta(
            index=completion.index,
            choice=completion.choice,
            text=completion.text or "",
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            completion=completion,
        )
        content: Json = {}
        if not self.request.is_chat:
            content["text"] = self.take_echo(delta.token_ids) + delta.text
        else:
            for part in self.parser.add(delta.text, last=True):
                self.message.add(part)
            content = {"message": self.message.message()}
        return {
            "index": self.index,
            **content,
            "logprobs": self.delta_logprobs(delta, prompt_logprobs),
            **self.finish(completion),
            **self.extras(delta),
        }

    def chunks(
        self, delta: CompletionDelta, prompt_logprobs: Sequence[TokenLogprobs | None]
    ) -> list[Json]:
        """The choices of the chunks of a stream that a delta becomes; none if it adds nothing."""
        logprobs = self.delta_logprobs(delta, prompt_logprobs)
        extras = self.extras(delta)
        if self.request.is_chat:
            return self.chat_chunks(delta, logprobs, extras)
        has_content = bool(delta.text or (delta.token_ids and (logprobs or extras)))
        text = delta.text
        if self.is_first:
            # As long as a character of the prompt may be completed, there are no tokens.
            may_change = self.echo.endswith(REPLACEMENT) and not delta.token_ids
            if may_change and delta.completion is None:
                return []
            text = self.take_echo(delta.token_ids) + text
        if not has_content and not text and delta.completion is None:
            return []
        self.is_first = False
        end = self.finish(delta.completion)
        return [{"index": self.index, "text": text, "logprobs": logprobs, **end, **extras}]

    def chat_chunks(
        self, delta: CompletionDelta, logprobs: Json | None, extras: Json
    ) -> list[Json]:
        """The role first, then reasoning, content and calls, then the reason of the end."""
        is_last = delta.completion is not None
        self.held_logprobs += logprobs["content"] if logprobs else []
        self.held_token_ids += extras.get("token_ids", [])
        parts = [self.message.add(part) for part in self.parser.add(delta.text, is_last)]
        chunks: list[Json] = []
        if self.is_first and (parts or is_last):
            self.is_first = False
            prompt = {name: ids for name, ids in extras.items() if name == "prompt_token_ids"}
            start = {"role": "assistant", "content": ""}
            chunks.append({"delta": start, "logprobs": None, **prompt})
        chunks += [{"delta": part, **self.take_held()} for part in parts]
        if is_last:  # it has the tokens without text, such as the end-of-sequence token
            chunks.append({"delta": {}, **self.take_held(), **self.finish(delta.completion)})
        return [{"index": self.index, "finish_reason": None, **chunk} for chunk in chunks]

    def take_held(self) -> Json:
        """The log-probabilities and ids of the tokens of a chunk."""
        taken: Json = {"logprobs": None}
        if self.held_logprobs:
            taken["logprobs"] = {"content": self.held_logprobs, "refusal": None}
        if self.held_token_ids:
            taken["token_ids"] = self.held_token_ids
        self.held_logprobs, self.held_token_ids = [], []
        return taken

    def finish(self, completion: Completion | None) -> Json:
        end = finish(completion)
        if self.message.calls and end["finish_reason"] == "stop":
            end["finish_reason"] = "tool_calls"
        return end


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

    async def whole(self) -> bytes:
        """The response without a stream. Many log-probabilities are written in a thread."""
        completions: dict[int, Completion] = {}
        async with aclosing(self.active.deltas()) as deltas:
            async for prompt, delta in deltas:
                if delta.completion is not None:
                    self.add_usage(delta.completion)
                    self.usage.completion_tokens += len(delta.completion.token_ids)
                    index = prompt * self.request.num_choices + delta.choice
                    completions[index] = delta.completion
        num_tokens = self.usage.completion_tokens
        num_tokens += self.usage.prompt_tokens * self.request.num_choices
        extras: Json = {}  # of a chat, which has one prompt
        # One choice at a time: a thread cannot be cancelled.
        choices = [
            await self.write(num_tokens, self.encode_choice, index, completions, extras)
            for index in range(len(self.formatters))
        ]
        head = encode_json(self.head)[:-1] + b',"choices":['
        last = encode_json({"usage": self.usage.to_json(), **extras})[1:]
        return b"".join([head, b",".join(choices), b"],", last])

    def encode_choice(self, index: int, completions: dict[int, Completion], extras: Json) -> bytes:
        """A choice of the whole response. Adds the response's other fields to `extras`."""
        formatter = self.formatters[index]
        first = completions[index - index % self.request.num_choices]
        choice = formatter.choice(completions[index], first.prompt_logprobs)
        if self.request.prompt_logprobs is not None:
            records = {"prompt_logprobs": formatter.prompt_records(first.prompt_logprobs)}
            (extras if self.request.is_chat else choice).update(records)
        return encode_json_in_parts(choice)

    async def write(self, num_tokens: int, encode: Callable[..., bytes], *args: object) -> bytes:
        """The bytes that `encode` returns for `num_tokens` tokens. It is called in a thread if the
        tokens have many log-probabilities.
        """
        counts = self.request.logprobs, self.request.prompt_logprobs
        num_logprobs = num_tokens * max(0 if count is None else 1 + count for count in counts)
        if num_logprobs <= MAX_SHORT_LOGPROBS:
            return encode(*args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(LOGPROB_THREADS, encode, *args)

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
                formatter = self.formatters[prompt * self.request.num_choices + delta.choice]
                num_tokens = len(delta.token_ids)
                if self.request.echoes and formatter.is_first:
                    num_tokens += len(formatter.prompt_ids)
                events = await self.write(num_tokens, self.encode_delta, prompt, delta)
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

    def encode_delta(self, prompt: int, delta: CompletionDelta) -> bytes:
        return b"".join(map(self.encode_chunk, self.chunks(prompt, delta)))

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
        has_logprobs = choice["logprobs"] is not None
        content = encode_json_in_parts(choice) if has_logprobs else encode_json(choice)
        parts = [b"data: ", self.encoded_head, content, b"]"]
        if self.request.include_usage:
            usage = self.usage.to_json() if self.request.continuous_usage else None
            parts += [b',"usage":', encode_json(usage)]
        return b"".join([*parts, b"}\n\n"])


def finish(completion: Completion | None) -> Json:
    """How a choice ended. Raises ApiError if the engine could not go on with it."""
    if completion is None:
        return {"finish_reason": None}
    if completion.finish_reason not in FINISH_REASONS:
        message = completion.error or "the completion failed"
        if message.startswith(FAILURE):  # the client would repeat a request with another status
            raise ApiError(400, message, code="completion_failed")
        raise ApiError(500, message, SERVER_ERROR, code="completion_failed")
    return {
        "finish_reason": FINISH_REASONS[completion.finish_reason],
        "stop_reason": completion.stop_reason,
    }


def is_continuation(byte: int) -> bool:
    """Whether a byte of UTF-8 continues a character."""
    return byte & 0xC0 == 0x80


def drop(tokens: Iterable[int], token: int) -> list[int]:
    return [each for each in tokens if each != token]
