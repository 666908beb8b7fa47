"""Fields of bodies: what a field may do, as markers of its declaration, and those that many bodies
have.

A field without a marker acts. An `Inert` one does nothing. An `Unsupported` one would change the
completion or the response, and is refused unless its value is neutral. `NeutralAtOtherEndpoints`
adds neutral values at endpoints that do not have the field. The fields are those of OpenAI's API
and of vLLM's protocol.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator

from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.sampling.structured_outputs import StructuredOutputs, parse_response_format
from maxtext.inference.validation import RequestError, shorten

UNSUPPORTED = "unsupported_parameter"  # the code of an error
# What a value must be, by the kind of pydantic's error.
EXPECTED = {
    "bool_type": "true or false",
    "string_type": "text",
    "int_type": "a whole number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
# Values with which a field does nothing that is not supported. An empty object may be a value:
# `web_search_options: {}` asks for a search.
NEUTRAL_VALUES: tuple[Any, ...] = (False, 0, "", [])


@dataclass(frozen=True)
class Inert:
    """Marks a field that is accepted without an effect on the completion."""


@dataclass(frozen=True)
class Unsupported:
    """Marks a field that is not supported. `reason` is the end of the error's sentence."""

    neutral: tuple[Any, ...] = NEUTRAL_VALUES
    reason: str = ""


@dataclass(frozen=True)
class NeutralAtOtherEndpoints:
    """Values, besides NEUTRAL_VALUES and {}, with which a field does nothing at an endpoint that
    does not have it.
    """

    neutral: tuple[Any, ...]


MARKER = TypeVar("MARKER", Inert, Unsupported, NeutralAtOtherEndpoints)
InertField = Annotated[Any, Inert()]
UnsupportedField = Annotated[Any, Unsupported()]
UnsupportedObject = Annotated[Any, Unsupported(({},))]
# Without them a conversation, or another thing that the client relies on, would be lost.
ConversationField = Annotated[
    Any,
    Unsupported(
        (*NEUTRAL_VALUES, {}),
        ": this server keeps no conversations, so send the whole conversation as input",
    ),
]


class Body(BaseModel):
    """A body, or a part of one. A field that is absent has its default."""

    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)


class NamedBody(Body):
    """A body whose names are checked: those of `known_fields`, and of no other endpoint."""

    endpoint: ClassVar[str]
    ignored_fields: tuple[str, ...] = ()  # names in the body that mean nothing here

    @classmethod
    @cache
    def known_fields(cls) -> frozenset[str]:
        return frozenset(cls.model_fields) - {"ignored_fields"}


class OtherFields(NamedBody):
    """The fields that do not act, at the endpoints that generate."""

    suffix: UnsupportedField = None
    use_beam_search: UnsupportedField = None
    early_stopping: UnsupportedField = None
    audio: UnsupportedField = None
    prediction: UnsupportedField = None
    web_search_options: UnsupportedField = None
    priority: UnsupportedField = None
    chat_template: UnsupportedField = None
    functions: UnsupportedField = None
    documents: UnsupportedField = None
    prompt_embeds: UnsupportedField = None
    thinking_token_budget: UnsupportedField = None
    logits_processors: UnsupportedField = None
    guided_whitespace_pattern: UnsupportedField = None
    structural_tag: UnsupportedField = None
    repetition_detection: UnsupportedField = None
    watermarking: UnsupportedField = None
    logprob_token_ids: UnsupportedField = None
    routed_experts_prompt_start: UnsupportedField = None
    return_token_offsets: UnsupportedField = None
    return_prompt_text: UnsupportedField = None
    enable_response_messages: UnsupportedField = None
    mm_processor_kwargs: UnsupportedObject = None
    media_io_kwargs: UnsupportedObject = None
    vllm_xargs: UnsupportedObject = None
    kv_transfer_params: UnsupportedObject = None
    ec_transfer_params: UnsupportedObject = None
    modalities: Annotated[Any, Unsupported(([], ["text"]))] = None
    length_penalty: Annotated[Any, Unsupported((1,))] = None
    function_call: Annotated[Any, Unsupported(("none", "auto"))] = None  # without `functions`
    include_reasoning: Annotated[Any, Unsupported((True,))] = None
    truncation_side: Annotated[Any, Unsupported(("left",))] = None

    user: InertField = None
    store: InertField = None
    metadata: InertField = None
    service_tier: InertField = None
    prompt_cache_key: InertField = None
    prompt_cache_retention: InertField = None
    safety_identifier: InertField = None
    verbosity: InertField = None
    request_id: InertField = None  # it names the request
    session_id: InertField = None
    stream_interval: InertField = None  # how many tokens an event has depends on the engine's steps
    return_mm_kwargs: InertField = None  # of images, which prompts do not have
    guided_decoding_backend: InertField = None
    spaces_between_special_tokens: InertField = None  # there are none in texts


# Fields of SamplingParams that have another name, meaning or range in each kind of body.
OWN_FIELDS = ("n", "max_new_tokens", "logprobs", "prompt_logprobs")
SAMPLING_FIELDS = tuple(
    each.name for each in dataclasses.fields(SamplingParams) if each.name not in OWN_FIELDS
)
if TYPE_CHECKING:

    class SamplingFields(Body):
        structured_outputs: Any = None
else:
    # SamplingParams checks the values.
    SamplingFields = create_model(
        "SamplingFields", __base__=Body, **dict.fromkeys(SAMPLING_FIELDS, (Any, None))
    )


def given_sampling(body: SamplingFields) -> dict[str, Any]:
    """The fields of SamplingParams that a body has, with their names there."""
    names = (*SAMPLING_FIELDS, "n")
    return {name: getattr(body, name) for name in names if name in body.model_fields_set}


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # it pads events


class ChunkOptions(StreamOptions):
    """The `stream_options` of completions and chats, whose streams have chunks."""

    continuous_usage_stats: bool | None = None


class GenerationFields(SamplingFields, OtherFields):
    """The fields that completions, chats and responses share."""

    # Former names of the kinds of structured_outputs.
    guided_kinds: ClassVar[Mapping[str, str]] = {
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
    }

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    cache_salt: str = ""
    add_special_tokens: bool | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def format_field(self) -> tuple[str, Any]:
        """(name in errors, value) of the field with the form of the content."""
        raise NotImplementedError

    @cached_property
    def constraint(self) -> StructuredOutputs | None:
        """The constraint on the completion, if any. Raises RequestError for more than one."""
        format_name, response_format = self.format_field
        values = {} if response_format == {"type": "text"} else {format_name: response_format}
        names = ("structured_outputs", *self.guided_kinds)
        values |= {name: getattr(self, name) for name in names}
        given = [name for name, value in values.items() if value is not None]
        if len(given) > 1:
            param = given[0].partition(".")[0]
            raise RequestError(f"give either {given[0]} or {given[1]}", param)
        for name in given:
            if name == "structured_outputs":
                return StructuredOutputs.parse(values[name])
            if name in self.guided_kinds:
                kind = self.guided_kinds[name]
                return StructuredOutputs.from_kind(kind, values[name], param=name, name=name)
            return parse_response_format(values[name], name)
        return None

    @model_validator(mode="after")
    def check_stream_options(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise RequestError(
                "stream_options.include_obfuscation is not supported", "stream_options", UNSUPPORTED
            )
        return self

    @model_validator(mode="after")
    def check_constraint(self) -> "GenerationFields":
        _ = self.constraint
        return self


class ChoiceFields(GenerationFields):
    """The fields that completions and chats share."""

    stream_options: ChunkOptions | None = None
    n: Annotated[Any, NeutralAtOtherEndpoints((1,))] = None
    best_of: Annotated[int | None, NeutralAtOtherEndpoints((1,))] = None
    max_tokens: Any = None  # not read if max_completion_tokens is set
    max_completion_tokens: int | None = None
    response_format: Annotated[Any, NeutralAtOtherEndpoints(({"type": "text"},))] = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    echo: bool = False

    @property
    def format_field(self) -> tuple[str, Any]:
        return "response_format", self.response_format

    @property
    def token_limit(self) -> tuple[str, Any]:
        """(name in errors, value) of the field that limits the completion, None if it is absent."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @model_validator(mode="after")
    def check_choices(self) -> "ChoiceFields":
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise RequestError("best_of must be equal to n", "best_of")
        return self


@cache
def marked_fields(kind: type[Body], marker: type[MARKER]) -> dict[str, MARKER]:
    """The markers of a kind in the declaration of a body, by the names of the fields."""
    return {
        name: each
        for name, field in kind.model_fields.items()
        for each in field.metadata
        if isinstance(each, marker)
    }


def request_error(error: ValidationError) -> RequestError:
    """The first error of a body, as one sentence with the name of its field."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(map(str, first["loc"]))
    expected = EXPECTED[first["type"]]
    return RequestError(
        f"{name} must be {expected}, not {shorten(first['input'])}", str(first["loc"][0])
    )
