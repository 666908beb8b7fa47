"""Tools: Python functions that a model calls in its turns.

Functions may be async. The calls of a turn run at the same time, each in a thread of its own. An
exception, a call that does not fit the function, and one that takes too long become the text of the
result, so that the model can react.
"""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.inference.text.parsers import tool_calls
from maxtext.inference.text.parsers.reasoning import PARSER_TAGS as REASONING_TAGS
from maxtext.inference.text.parsers.reasoning import Reasoning, find_reasoning_parser
from maxtext.trainers.methods.rl.agents.environment import Message, SingleTurn, Step
from maxtext.trainers.methods.rl.agents.function_schema import Schema, function_schema

TOOL_SECONDS = 60.0


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


class Tools:
    """Functions by name, with their schemas. Raises ConfigError if one cannot be a tool."""

    def __init__(self, functions: Sequence[Callable[..., Any]], timeout: float = TOOL_SECONDS):
        self.schemas: list[Schema] = [function_schema(function) for function in functions]
        names = [schema["function"]["name"] for schema in self.schemas]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two tools have the name {repeated[0]!r}: rename one")
        self.functions = dict(zip(names, functions, strict=True))
        self.parameters = {
            schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas
        }
        self.timeout = timeout

    def run(self, calls: Sequence[ToolCall]) -> list[str]:
        """The results of calls as texts."""
        results = run_in_threads([partial(self.call, call) for call in calls], self.timeout)
        late = f"Error: no result within {self.timeout:g} seconds"
        return [late if result is None else result for result in results]

    def call(self, call: ToolCall) -> str:
        function = self.functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name!r}; there are {', '.join(self.functions)}"
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return f"Error: {call.name}: {error}"
        try:
            result = function(**call.arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(wait_for(result))
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            return f"Error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)


async def wait_for(awaitable: Any) -> Any:
    return await awaitable


def run_in_threads(
    functions: Sequence[Callable[[], Any]], timeout: float | None = None
) -> list[Any]:
    """The results of functions that run at the same time; None for those without a result within
    `timeout` seconds. Their threads end with the process."""
    results: list[Any] = [None] * len(functions)

    def work(index: int) -> None:
        results[index] = functions[index]()

    threads = [
        threading.Thread(target=work, args=(index,), daemon=True, name="maxtext-tool")
        for index in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    deadline = None if timeout is None else time.monotonic() + timeout
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    return list(results)


@dataclass(frozen=True)
class CallFormat:
    """How the turns of a model's family have reasoning and calls: names of parsers, as those of the
    server."""

    tool_parser: str = "none"  # of `tool_calls.PARSERS`
    reasoning_parser: str = "none"  # of `reasoning.PARSERS`

    @classmethod
    def from_template(cls, template: str) -> "CallFormat":
        """Raises ConfigError if the chat template has no form of calls."""
        tool_parser = tool_calls.find_tool_parser(template)
        if tool_parser == "none":
            raise ConfigError(
                "the chat template of this model has no form of tool calls that is known here: set "
                "chat_template_path to one that has, such as <tool_call> of Qwen"
            )
        return cls(tool_parser, find_reasoning_parser(template))

    @property
    def tags(self) -> tuple[str, ...]:
        """The special tokens that reasoning and calls are recognised by."""
        return (
            *tool_calls.PARSER_TAGS[self.tool_parser],
            *REASONING_TAGS[self.reasoning_parser],
        )


class ToolEnvironment(SingleTurn):
    """The conversation of a row in which the model may call tools. It ends with the first turn
    without a call."""

    def __init__(self, tools: Tools, call_format: CallFormat):
        self.tools = tools
        self.call_format = call_format
        self.reasoning = Reasoning(call_format.reasoning_parser)

    def begin_turn(self, prompt: str) -> None:
        """`prompt` ends with the header of the turn, which may open or close its reasoning."""
        self.reasoning = Reasoning.from_prompt(self.call_format.reasoning_parser, prompt)

    def step(self, text: str) -> Step:
        parser = self.call_format.tool_parser
        calls = parse_calls(text, parser, self.tools.parameters, self.reasoning)
        if not calls:
            return (), None, True
        messages: list[Message] = [
            {
                "role": "tool",
                "name": call.name,
                "tool_call_id": f"call{index:05d}",
                "content": result,
            }
            for index, (call, result) in enumerate(zip(calls, self.tools.run(calls), strict=True))
        ]
        return messages, None, False


def parse_calls(
    text: str,
    parser: str,
    parameters: Mapping[str, Schema],
    reasoning: Reasoning | None = None,
) -> list[ToolCall]:
    """The calls in a turn; what cannot be parsed is none, and neither is what the model writes as
    its reasoning. `parameters`: schemas by function. `reasoning`: that of the turn, by default as
    if its header opened none.
    """
    if reasoning is None:
        has_own = parser in ("gpt_oss", "seed_oss")
        reasoning = Reasoning(parser if has_own else "think")
    calls = tool_calls.build_tool_parser(parser, parameters)
    message_parser = reasoning.build_parser(calls, with_channel_calls=parser == "gpt_oss")
    names: list[str] = []
    arguments: list[str] = []
    for delta in message_parser.add(text, last=True):
        if delta.name is not None:
            names.append(delta.name)
            arguments.append("")
        if delta.index is not None:
            arguments[delta.index] += delta.arguments
    parsed = zip(names, map(parse_arguments, arguments), strict=True)
    return [ToolCall(name, values) for name, values in parsed if values is not None]


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object of a JSON text. A parser hands over arguments as the model writes them, before it
    knows whether they are valid: None if they are not."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
