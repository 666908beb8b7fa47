"""Tools: Python functions that a model calls in its turns, and their JSON schemas.

`Tools` runs calls. Functions may be async. The calls of a turn run at the same time, each in a
thread of its own. An exception, a call that does not fit the function, and one that takes too long
become the text of the result, so that the model can react.

`function_schema` reads the schema of a function from its type hints and its docstring. A docstring
has a description, and in a section `Args:` a line `name: description` for each argument, which may
end in `(choices: ["a", "b"])`. The schemas are those of `get_json_schema` of transformers, which
chat templates expect.
"""

import asyncio
import contextlib
import inspect
import json
import re
import threading
import time
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeVar, Union

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.inference.text.parsers import tool_calls
from maxtext.inference.text.parsers.reasoning import PARSER_TAGS as REASONING_TAGS
from maxtext.inference.text.parsers.reasoning import Reasoning, find_reasoning_parser
from maxtext.trainers.methods.rl.agents.environment import Message, SingleTurn, Step

Schema = Json
Result = TypeVar("Result")
BASIC_TYPES: dict[object, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
SECTION = re.compile(r"^(Args|Returns|Raises):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^(\w+):\s*(.*)", re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.DOTALL | re.IGNORECASE)


def function_schema(function: Callable[..., object]) -> Schema:
    """{"type": "function", "function": {"name", "description", "parameters"}}. Raises ConfigError
    if the function has no docstring, or an argument no type hint that JSON can express."""
    name = getattr(function, "__name__", type(function).__name__)
    description, arguments, returns = parse_docstring(name, inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function)
    properties: dict[str, Schema] = {}
    required = []
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"the argument {argument} of the tool {name} has no name in a call: tools have "
                "neither *args, **kwargs nor positional arguments"
            )
        if argument not in hints:
            raise ConfigError(f"the argument {argument} of the tool {name} has no type hint")
        schema = dict(type_schema(hints[argument], f"the argument {argument} of the tool {name}"))
        text = arguments.get(argument, "")
        if choices := CHOICES.search(text):
            schema["enum"] = parse_choices(choices[1], argument, name)
            text = text[: choices.start()].strip()
        properties[argument] = schema | ({"description": text} if text else {})
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        # The model never writes a result, so one that JSON cannot express is left out.
        with contextlib.suppress(ConfigError):
            schema["return"] = type_schema(hints["return"], "the result")
            schema["return"] |= {"description": returns} if returns else {}
    return {"type": "function", "function": schema}


def parse_docstring(name: str, text: str) -> tuple[str, dict[str, str], str]:
    """The description, those of the arguments, and that of the result."""
    if not text.strip():
        raise ConfigError(
            f"the tool {name} has no docstring: the model would not know what it does"
        )
    first, *rest = SECTION.split(text.strip())
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    arguments = {}
    for block in split_items(sections.get("Args", "")):
        match = ARGUMENT.match(block)
        if match:
            arguments[match[1]] = re.sub(r"\s*\n\s*", " ", match[2].strip())
    return first.strip(), arguments, sections.get("Returns", "").strip()


def split_items(section: str) -> list[str]:
    """The items of a section: a line that is indented more than the first one continues an item."""
    lines = [line for line in section.splitlines() if line.strip()]
    items: list[str] = []
    for line in lines:
        is_deeper = indentation(line) > indentation(lines[0])
        if items and is_deeper:
            items[-1] += "\n" + line.strip()
        else:
            items.append(line.strip())
    return items


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def parse_choices(text: str, argument: str, name: str) -> list[object]:
    try:
        choices = json.loads(text)
    except ValueError:
        choices = None
    if not isinstance(choices, list):
        raise ConfigError(
            f"the choices of the argument {argument} of the tool {name} must be a JSON list, not "
            f"{text!r}"
        )
    return choices


def type_schema(hint: object, what: str) -> Schema:
    """The schema of the values of a type. Raises ConfigError, which names `what`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None and isinstance(hint, type) and issubclass(hint, Enum):
        return enum_schema([member.value for member in hint], what)
    if origin is None and hint in BASIC_TYPES:
        return dict(BASIC_TYPES[hint])
    if origin in (Union, types.UnionType):
        return union_schema(args, what)
    if origin is Literal:
        return enum_schema(list(args), what)
    if origin is list:
        return {"type": "array", "items": type_schema(args[0], what)}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [type_schema(each, what) for each in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(args[1], what)}
    raise ConfigError(
        f"{what} has the type {hint!r}: use int, float, str, bool, Literal, Enum, or list, tuple, "
        "dict and unions of these"
    )


def union_schema(args: tuple[object, ...], what: str) -> Schema:
    schemas = [type_schema(each, what) for each in args if each is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(each.keys() == {"type"} for each in schemas):
        names = sorted({each["type"] for each in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in args else {})


def enum_schema(values: list[object], what: str) -> Schema:
    if not values or any(type(value) not in SCALARS for value in values):
        raise ConfigError(f"{what} must have one or more texts, numbers or booleans as its choices")
    names = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


TOOL_SECONDS = 60.0


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Json


class Tools:
    """Functions by name, with their schemas. Raises ConfigError if one cannot be a tool."""

    def __init__(self, functions: Sequence[Callable[..., object]], timeout: float = TOOL_SECONDS):
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


async def wait_for(awaitable: Awaitable[object]) -> object:
    return await awaitable


def run_in_threads(
    functions: Sequence[Callable[[], Result]], timeout: float | None = None
) -> list[Result | None]:
    """The results of functions that run at the same time; None for those without a result within
    `timeout` seconds. Their threads end with the process."""
    results: list[Result | None] = [None] * len(functions)

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
    return list(results)  # a late thread changes the other one


@dataclass(frozen=True)
class CallFormat:
    """How the turns of a model's family have reasoning and calls: names of parsers, as those of the
    server."""

    tool_parser: str = "none"  # of `tool_calls.TOOL_PARSERS`
    reasoning_parser: str = "none"  # of `reasoning.REASONING_PARSERS`

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
        has_own = parser in ("harmony", "seed_oss")
        reasoning = Reasoning(parser if has_own else "think")
    calls = tool_calls.build_tool_parser(parser, parameters)
    message_parser = reasoning.build_parser(calls, with_channel_calls=parser == "harmony")
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


def parse_arguments(text: str) -> Json | None:
    """The object of a JSON text. A parser hands over arguments as the model writes them, before it
    knows whether they are valid: None if they are not."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
