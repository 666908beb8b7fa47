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
from maxtext.inference.parsers import reasoning, tool_calls
from maxtext.inference.parsers.message_parser import MessageParser
from maxtext.trainers.rl.agents.environment import Message, SingleTurn, Step
from maxtext.trainers.rl.agents.function_schema import Schema, function_schema

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


class ToolEnvironment(SingleTurn):
    """The conversation of a row in which the model may call tools. It ends with the first turn
    without a call. `parser`: the form of calls, by `call_format`."""

    def __init__(self, tools: Tools, parser: str):
        self.tools = tools
        self.parser = parser

    def step(self, text: str) -> Step:
        calls = parse_calls(text, self.parser, self.tools.parameters)
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


def call_format(template: str) -> str:
    """The form of calls of a model's family. Raises ConfigError if its chat template has none."""
    parser = tool_calls.find_tool_parser(template)
    if parser == "none":
        raise ConfigError(
            "the chat template of this model has no form of tool calls that is known here: set "
            "chat_template_path to one that has, such as <tool_call> of Qwen"
        )
    return parser


def call_tags(parser: str) -> tuple[str, ...]:
    """The special tokens that calls are recognised by."""
    return (*tool_calls.PARSER_TAGS[parser], *reasoning.PARSER_TAGS.get(parser, ()))


def parse_calls(text: str, parser: str, parameters: Mapping[str, Schema]) -> list[ToolCall]:
    """The calls in a turn; what cannot be parsed is none. `parameters`: schemas by function."""
    message_parser: MessageParser
    if parser == "gpt_oss":
        message_parser = reasoning.HarmonyParser(with_calls=True)
    else:
        message_parser = tool_calls.build_tool_parser(parser, parameters)
    names: list[str] = []
    arguments: list[str] = []
    for delta in message_parser.add(text, last=True):
        if delta.name is not None:
            names.append(delta.name)
            arguments.append("")
        if delta.index is not None:
            arguments[delta.index] += delta.arguments
    calls = zip(names, map(parse_arguments, arguments), strict=True)
    return [ToolCall(name, parsed) for name, parsed in calls if parsed is not None]


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object of a JSON text. A parser hands over arguments as the model writes them, before it
    knows whether they are valid: None if they are not."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
