"""The bodies of requests as frozen models: which fields an endpoint has is declared here alone.

null is the same as absent in every field. A field that is missing, wrong or not supported is a
RequestError with its name. Behind `JsonBody.parse`, nothing reads a body by the names of its
fields.
"""

import math
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, ValidationError, model_validator

from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.server.fields import (
    NEUTRAL_VALUES,
    SAMPLING_FIELDS,
    UNSUPPORTED,
    Body,
    ChoiceFields,
    ConversationField,
    GenerationFields,
    Inert,
    NamedBody,
    NeutralAtOtherEndpoints,
    OtherFields,
    Unsupported,
    marked_fields,
    request_error,
)
from maxtext.inference.server.messages import MAX_DEPTH, Message, parse_messages, read_items
from maxtext.inference.server.model import is_request_id
from maxtext.inference.server.tools import (
    Tool,
    ToolChoice,
    ToolOptions,
    parse_choice,
    parse_function_choice,
    parse_tools,
    read_functions,
)
from maxtext.inference.strict_json import JsonReader
from maxtext.inference.validation import RequestError, check_range, check_token_ids, shorten

BODY = TypeVar("BODY", bound=Body)
READER = JsonReader("the body", has_unique_keys=True, max_depth=MAX_DEPTH)
MAX_SHORT_PROMPT = 2000  # characters or token ids
MAX_NAME = 60  # characters of an unknown name in an error


def parse_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of /v1/completions: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str) or is_ids(prompt):
        return [prompt]
    is_list = isinstance(prompt, list) and bool(prompt)
    if not is_list or not (
        all(isinstance(each, str) for each in prompt) or all(map(is_ids, prompt))
    ):
        raise RequestError(
            "prompt must be text, a list of texts, token ids, or a list of lists of token ids, "
            f"none of them empty, not {shorten(prompt)}",
            "prompt",
        )
    return list(prompt)


def is_ids(value: Any) -> bool:
    """Whether a value of JSON is a list of token ids: integers, which Booleans are not."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0


class CompletionRequest(ChoiceFields):
    endpoint: ClassVar[str] = "/v1/completions"

    prompt: Annotated[list[str | list[int]], PlainValidator(parse_prompts)] = Field(
        default=None, validate_default=True
    )
    logprobs: int | None = None


def check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    if "tools" in variables:
        raise RequestError("chat_template_kwargs may not set tools", "chat_template_kwargs")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(check_variables)]
Messages = Annotated[list[Message], PlainValidator(parse_messages)]


class ConversationFields(NamedBody):
    """The fields of a chat that its text depends on."""

    messages: Messages | None = None
    tools: Any = []
    tool_choice: Annotated[Any, NeutralAtOtherEndpoints(("none", "auto"))] = None
    parallel_tool_calls: Annotated[bool, NeutralAtOtherEndpoints((True,))] = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: Annotated[bool | None, NeutralAtOtherEndpoints((True,))] = None
    continue_final_message: bool = False
    reasoning_effort: str = ""

    @cached_property
    def tool_options(self) -> ToolOptions:
        """Raises RequestError for wrong tools; a server that takes no tools does not read them."""
        tools = parse_tools(self.tools)
        choice = parse_choice(self.tool_choice, tools)
        return ToolOptions.from_choice(tools, choice, self.parallel_tool_calls)

    @property
    def adds_generation_prompt(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template besides the messages."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        if self.reasoning_effort:
            variables["reasoning_effort"] = self.reasoning_effort
        variables |= self.chat_template_kwargs
        if self.tool_options.definitions:
            variables["tools"] = list(self.tool_options.definitions)
        return variables

    @model_validator(mode="after")
    def check_conversation(self) -> "ConversationFields":
        if self.messages is None:  # a text, which does not depend on the other fields
            return self
        check_variables(self.chat_template_kwargs)
        if self.continue_final_message and self.adds_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false",
                "continue_final_message",
            )
        return self


class ChatRequest(ChoiceFields, ConversationFields):
    endpoint: ClassVar[str] = "/v1/chat/completions"

    messages: Messages = Field(default=None, validate_default=True)
    logprobs: bool = False
    top_logprobs: int = 0

    @model_validator(mode="after")
    def check_chat(self) -> "ChatRequest":
        if self.echo:
            raise RequestError("echo is for /v1/completions", "echo", UNSUPPORTED)
        return self


class ResponsesChat(ChatRequest):
    """The chat that a body of /v1/responses stands for, with the names there in errors."""

    @cached_property
    def offered_tools(self) -> list[Tool]:
        return parse_tools(self.tools)

    @cached_property
    def choice(self) -> ToolChoice:
        return parse_function_choice(self.tool_choice, self.offered_tools)

    @cached_property
    def tool_options(self) -> ToolOptions:
        return ToolOptions.from_choice(self.offered_tools, self.choice, self.parallel_tool_calls)

    @property
    def token_limit(self) -> tuple[str, Any]:
        if self.max_completion_tokens is None:
            return "max_tokens", None
        return "max_output_tokens", self.max_completion_tokens


# Values of `include`. They are about output that the server never has: of tools that it would run
# itself, images, and reasoning that a client may not read.
INERT_INCLUDES = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)


def check_include(include: Any) -> Any:
    if not isinstance(include, list):
        raise RequestError(f"include must be a list of texts, not {shorten(include)}", "include")
    for value in include:
        if value not in INERT_INCLUDES:
            raise RequestError(f"include may not have {shorten(value)}", "include", UNSUPPORTED)
    return include


def check_truncation(value: Any) -> Any:
    if value != "disabled":
        message = f"truncation must be disabled, not {shorten(value)}"
        raise RequestError(message, "truncation", UNSUPPORTED)
    return value


class ResponsesRequest(GenerationFields):
    """The server keeps no state: `input` is the whole conversation. The response repeats fields,
    so they have the form that the client gave them.
    """

    endpoint: ClassVar[str] = "/v1/responses"

    previous_response_id: ConversationField = None
    background: ConversationField = None
    conversation: ConversationField = None
    prompt: ConversationField = None
    previous_input_messages: ConversationField = None
    previous_response: ConversationField = None
    context_management: Annotated[Any, Unsupported((*NEUTRAL_VALUES, {}))] = None
    moderation: Annotated[Any, Unsupported((*NEUTRAL_VALUES, {}))] = None
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that the server would run
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateVariables = {}
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    include: Annotated[Any, AfterValidator(check_include)] = None
    truncation: Annotated[
        Any, AfterValidator(check_truncation), NeutralAtOtherEndpoints(("disabled",))
    ] = None
    client_metadata: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    store: bool = False
    top_logprobs: int = 0

    @property
    def format_field(self) -> tuple[str, Any]:
        form = self.text.get("format")
        if isinstance(form, Mapping) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
        return "text.format", form

    @model_validator(mode="after")
    def check_response(self) -> "ResponsesRequest":
        for name in ("top_logprobs", "prompt_logprobs"):
            if getattr(self, name):
                raise RequestError(
                    "/v1/responses has no log-probabilities: use /v1/chat/completions",
                    name,
                    UNSUPPORTED,
                )
        if self.max_tool_calls is not None:
            check_range("max_tool_calls", self.max_tool_calls, 1, math.inf, whole=True)
        options = {
            "reasoning.effort": self.reasoning.get("effort"),
            "reasoning.summary": self.reasoning.get("summary"),
            "text.verbosity": self.text.get("verbosity"),
        }
        for name, value in options.items():
            if not isinstance(value, str | None):
                param = name.partition(".")[0]
                raise RequestError(f"{name} must be text, not {shorten(value)}", param)
        return self

    def to_chat(self) -> ChatRequest:
        """The chat that continues this conversation."""
        names = ("model", "stream", "parallel_tool_calls", "chat_template_kwargs", "cache_salt")
        common = {
            name: getattr(self, name)
            for name in (*names, "add_special_tokens", *SAMPLING_FIELDS)
            if name in self.model_fields_set
        }
        messages = read_items(self.instructions, self.input)
        return ResponsesChat.model_construct(
            **common
            | {
                "messages": messages,
                "tools": read_functions([] if self.tools is None else self.tools),
                "tool_choice": self.tool_choice,
                "max_completion_tokens": self.max_output_tokens,
                "reasoning_effort": self.reasoning.get("effort") or "",
                "structured_outputs": self.constraint,
            }
        )

    def repeated_fields(self, params: SamplingParams) -> dict[str, Any]:
        """The fields that the response repeats, `params` with the model's defaults."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **self.reasoning},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **self.text},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [] if self.tools is None else self.tools,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


class TokenizeRequest(ConversationFields):
    """A text or a conversation. A body of a completion or a chat has the tokens of its prompt."""

    endpoint: ClassVar[str] = "/tokenize"

    prompt: str | None = None
    tools: list[object] = []
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @classmethod
    @cache
    def known_fields(cls) -> frozenset[str]:
        generation = CompletionRequest.known_fields() | ChatRequest.known_fields()
        return (super().known_fields() | generation) - {"truncate_prompt_tokens"}  # not cut

    @cached_property
    def tool_options(self) -> ToolOptions:
        """As vLLM's endpoint: tools are rendered whatever would call them."""
        tools = parse_tools(self.tools)
        return ToolOptions.from_choice(tools, ToolChoice("none"), self.parallel_tool_calls)

    @model_validator(mode="before")
    @classmethod
    def check_text(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if "messages" in fields and "prompt" in fields:
            raise RequestError("give either prompt or messages", "prompt")
        if "messages" not in fields and "prompt" not in fields:
            raise RequestError("prompt or messages is missing", "prompt")
        return fields


def check_tokens(tokens: Any) -> tuple[int, ...]:
    return check_token_ids("tokens", tokens)


class DetokenizeRequest(NamedBody):
    endpoint: ClassVar[str] = "/detokenize"

    model: str | None = None
    tokens: Annotated[tuple[int, ...], PlainValidator(check_tokens)] = Field(
        default=None, validate_default=True
    )


class UnloadAdapterRequest(Body):
    lora_name: str = ""


class LoadAdapterRequest(UnloadAdapterRequest):
    lora_path: str = ""


GENERATION_BODIES = (CompletionRequest, ChatRequest, ResponsesRequest)
GENERATION_FIELDS = frozenset(name for kind in GENERATION_BODIES for name in kind.known_fields())
INERT_FIELDS = marked_fields(OtherFields, Inert)
UNSUPPORTED_FIELDS = marked_fields(OtherFields, Unsupported)
NEUTRAL_AT_OTHER_ENDPOINTS = {
    name: (*NEUTRAL_VALUES, {}, *marker.neutral)
    for kind in GENERATION_BODIES
    for name, marker in marked_fields(kind, NeutralAtOtherEndpoints).items()
}


@cache
def unsupported_fields(kind: type[NamedBody]) -> dict[str, Unsupported]:
    """The unsupported fields of the endpoint, including fields that no endpoint supports."""
    return {**marked_fields(kind, Unsupported), **UNSUPPORTED_FIELDS}


class JsonBody:
    """A JSON object whose fields are not checked yet."""

    def __init__(self, fields: Mapping[str, Any]):
        self.fields = {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_bytes(cls, data: bytes) -> "JsonBody":
        """Raises RequestError unless these are a JSON object."""
        fields = READER.read(data)
        if not isinstance(fields, dict):
            raise RequestError("the body must be a JSON object")
        return cls(fields)

    @property
    def model(self) -> Any:
        """The name of a model, if it is text."""
        return self.fields.get("model")

    @property
    def request_id(self) -> str | None:
        request_id = self.fields.get("request_id")
        if not isinstance(request_id, str | None):
            raise RequestError(f"request_id must be text, not {shorten(request_id)}", "request_id")
        if request_id is not None and not is_request_id(request_id):
            raise RequestError(
                "request_id must have 1 to 128 characters of ASCII without blanks", "request_id"
            )
        return request_id

    @property
    def has_long_preparation(self) -> bool:
        """Whether to parse a request with a short body in a thread: a chat template is a program,
        and long texts and bad words take a while to tokenize. For short prompts the thread would
        take longer.
        """
        prompt = self.fields.get("prompt")
        return (
            "messages" in self.fields
            or "bad_words" in self.fields
            or not isinstance(prompt, str | list)
            or len(prompt) > MAX_SHORT_PROMPT
            or (isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int))
        )

    def parse(self, kind: type[BODY], is_strict: bool = False) -> BODY:
        """Raises RequestError for the first field that is wrong, with `is_strict` also for an
        unknown one.
        """
        if not issubclass(kind, NamedBody):
            return validate(kind, self.fields)
        ignored_fields = self.check_names(kind, is_strict)
        return validate(kind, {**self.fields, "ignored_fields": ignored_fields})

    def check_names(self, kind: type[NamedBody], is_strict: bool = False) -> tuple[str, ...]:
        """The names of fields that mean nothing. Raises RequestError for fields that are not
        supported, for those that act at other endpoints only, and with `is_strict` for all others
        that are unknown.
        """
        unsupported = unsupported_fields(kind)
        for name in [] if self.fields.keys().isdisjoint(unsupported) else unsupported:
            marker = unsupported[name]
            if name in self.fields and self.fields[name] not in marker.neutral:
                message = f"{name} is not supported{marker.reason}"
                raise RequestError(message, name, UNSUPPORTED)
        unknown = sorted(self.fields.keys() - kind.known_fields())
        for name in unknown:
            is_unused = name in INERT_FIELDS or name in UNSUPPORTED_FIELDS
            neutral = NEUTRAL_AT_OTHER_ENDPOINTS.get(name, (*NEUTRAL_VALUES, {}))
            if name in GENERATION_FIELDS and not is_unused and self.fields[name] not in neutral:
                raise RequestError(f"{name} is no field of {kind.endpoint}", name, UNSUPPORTED)
        unknown = [name for name in unknown if name not in GENERATION_FIELDS]
        if unknown and is_strict:
            raise RequestError(f"unknown field {unknown[0][:MAX_NAME]!r}", unknown[0][:MAX_NAME])
        return tuple(unknown)


def validate(kind: type[BODY], fields: Mapping[str, Any]) -> BODY:
    """A body whose names are checked. Raises RequestError for the first field that is wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise request_error(error) from error
