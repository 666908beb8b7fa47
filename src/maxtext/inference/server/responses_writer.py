"""The response to /v1/responses: output items, whole or as events."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from maxtext.inference.requests import Completion
from maxtext.inference.server.completions_writer import Json, finish
from maxtext.inference.server.events import ActiveRequest, encode_json
from maxtext.inference.server.model import ServedModel, new_id
from maxtext.inference.server.request_parser import ApiRequest
from maxtext.inference.text.parsers.message_parser import MessageDelta

# The part of an item with text by the type of the item; events about it have the same name.
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
Event = tuple[str, Json]  # its type, without `response.`, and its fields


class OutputItems:
    """The output of a response, from the deltas of a message. Methods return events."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self.is_open = False  # the last item is not complete

    def add(self, delta: MessageDelta) -> list[Event]:
        if delta.index is not None:
            events = []
            if delta.name is not None:
                call_id = f"call_{new_id()[:24]}"
                fields = {"call_id": call_id, "name": delta.name, "arguments": ""}
                events += self.open_item("function_call", fields)
            return events + (self.add_arguments(delta.arguments) if delta.arguments else [])
        kind = "reasoning" if delta.reasoning else "message"
        text = delta.reasoning or delta.content
        events = []
        if not self.is_open or self.items[-1]["type"] != kind:
            is_message = kind == "message"
            head: Json = {"role": "assistant"} if is_message else {"summary": []}
            events += self.open_item(kind, {**head, "content": []})
            notes: Json = {"annotations": [], "logprobs": []} if is_message else {}
            part = {"type": PARTS[kind], "text": "", **notes}
            events.append(("content_part.added", {**self.part_position, "part": dict(part)}))
            self.items[-1]["content"].append(part)
        self.items[-1]["content"][0]["text"] += text
        fields = {**self.part_position, "delta": text}
        return [*events, (f"{PARTS[kind]}.delta", self.with_logprobs(fields))]

    def add_arguments(self, text: str) -> list[Event]:
        self.items[-1]["arguments"] += text
        return [("function_call_arguments.delta", {**self.position, "delta": text})]

    def open_item(self, kind: str, fields: Json) -> list[Event]:
        events = self.close()
        item = {
            "id": f"{PREFIXES[kind]}_{new_id()}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        self.items.append(item)
        self.is_open = True
        added = {"output_index": len(self.items) - 1, "item": copy_item(item)}
        return [*events, ("output_item.added", added)]

    def close(self, status: str = "completed") -> list[Event]:
        """Complete the last item."""
        if not self.is_open:
            return []
        self.is_open = False
        item = self.items[-1]
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(("function_call_arguments.done", {**self.position, **done}))
        else:
            (part,) = item["content"]
            done = self.with_logprobs({**self.part_position, "text": part["text"]})
            events.append((f"{PARTS[item['type']]}.done", done))
            events.append(("content_part.done", {**self.part_position, "part": dict(part)}))
        last = {"output_index": len(self.items) - 1, "item": copy_item(item)}
        return [*events, ("output_item.done", last)]

    @property
    def position(self) -> Json:
        """Of the last item."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def part_position(self) -> Json:
        return {**self.position, "content_index": 0}

    def with_logprobs(self, fields: Json) -> Json:
        return {**fields, "logprobs": []} if self.items[-1]["type"] == "message" else fields


def copy_item(item: Json) -> Json:
    """An item as it is now."""
    has_parts = isinstance(item.get("content"), list)
    parts = {"content": [dict(part) for part in item["content"]]} if has_parts else {}
    return {**item, **parts}


class ResponsesWriter:
    """Writes the response to one request of /v1/responses."""

    def __init__(self, model: ServedModel, request: ApiRequest, active: ActiveRequest):
        self.model = model
        self.request = request
        self.active = active
        self.parser = request.format.build_parser()
        self.output = OutputItems()
        self.completion: Completion | None = None
        self.sequence_number = 0
        self.head: Json = {
            "id": f"resp_{new_id()}",
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            **request.settings,
        }

    async def deltas(self) -> AsyncGenerator[list[Event], None]:
        """The events of what each step adds, the last with those that complete the output."""
        async with aclosing(self.active.deltas()) as deltas:
            async for _, delta in deltas:
                is_last = delta.completion is not None
                events: list[Event] = []
                for part in self.parser.add(delta.text, is_last):
                    events += self.output.add(part)
                if delta.completion is not None:
                    self.completion = delta.completion
                    if not self.output.items:
                        events += self.output.add(MessageDelta())
                    is_cut = finish(delta.completion)["finish_reason"] == "length"
                    events += self.output.close("incomplete" if is_cut else "completed")
                if events:
                    yield events

    async def whole(self) -> bytes:
        """The response without a stream."""
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass
        return encode_json(self.response())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events."""
        start = self.encode("created", {"response": self.response()})
        start += self.encode("in_progress", {"response": self.response()})
        async with aclosing(self.deltas()) as deltas:
            async for events in deltas:
                yield start + b"".join(self.encode(*event) for event in events)
                start = b""
        response = self.response()
        yield start + self.encode(response["status"], {"response": response})

    def encode(self, kind: str, fields: Json) -> bytes:
        name = f"response.{kind}"
        event: Json = {"type": name, "sequence_number": self.sequence_number, **fields}
        self.sequence_number += 1
        return b"event: " + name.encode() + b"\ndata: " + encode_json(event) + b"\n\n"

    def response(self) -> Json:
        """The response as it is now."""
        status, usage, is_cut = "in_progress", None, False
        if self.completion is not None:
            is_cut = finish(self.completion)["finish_reason"] == "length"
            status = "incomplete" if is_cut else "completed"
            usage = self.usage(self.completion)
        return {
            **self.head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [copy_item(item) for item in self.output.items],
            "usage": usage,
        }

    def usage(self, completion: Completion) -> Json:
        num_input = len(self.active.streams[0].prompt_ids)
        num_output = len(completion.token_ids)
        reasoning = self.request.format.reasoning
        num_reasoning = reasoning.count_tokens(completion.token_ids, self.model.tokenizer)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": completion.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + num_output,
        }
