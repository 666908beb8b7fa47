"""From the body of a request to what the engine generates, for completions and chats."""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from maxtext.common.errors import UserError
from maxtext.common.types import Json
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import MAX_N, SamplingParams
from maxtext.inference.sampling.sampler import prompt_seed
from maxtext.inference.sampling.structured_outputs import StructuredOutputs
from maxtext.inference.server.fields import (
    UNSUPPORTED,
    ChoiceFields,
    ChunkOptions,
    given_sampling,
)
from maxtext.inference.server.messages import MessageFormat
from maxtext.inference.server.model import ServedModel
from maxtext.inference.server.protocol import (
    ChatRequest,
    CompletionRequest,
    ConversationFields,
    JsonBody,
    ResponsesRequest,
)
from maxtext.inference.server.tools import ToolOptions
from maxtext.inference.text.parsers.reasoning import Reasoning
from maxtext.inference.validation import RequestError, check_range, check_whole_number
from maxtext.tokenizers.chat import TemplateRefusal

DEFAULT_TEMPERATURE = 1.0  # of requests, unless generation_config.json has another
MAX_MESSAGE = 1000  # characters of an error of the template
DEFAULT_MAX_TOKENS = 16  # of completions; of chats, what the maximum length leaves
# Fields with the form of the content, of which a call has none.
CONTENT_FORMATS = ("response_format", "text")
# A text of megabytes takes seconds and hundreds of megabytes of memory to tokenize: only as much of
# it is tokenized as the maximum length can need.
# A token has at most as many characters, where the vocabulary sets no limit: an unknown token may
# stand for any number of them.
MAX_TOKEN_CHARS = 256
USUAL_TOKEN_CHARS = 8  # most texts have fewer characters a token
# Tokens at the beginning of a part of a text may differ from those of the whole text.
OVERLAP = 64
MAX_WORD_CHARS = 1024  # within which a part is moved to begin with a word
# Every kind of tokenizer begins a token with this blank, whatever stands before it.
WORD_START = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


@dataclass(frozen=True)
class ApiRequest:
    """A body that was read. `requests` has one for each prompt, `echoes` the texts of prompts that
    precede the completions.
    """

    model: str  # in responses
    requests: tuple[GenerationRequest, ...]
    is_chat: bool
    stream: bool = False
    include_usage: bool = False  # in a last chunk of a stream
    continuous_usage: bool = False  # in every chunk
    echoes: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    format: MessageFormat = field(default_factory=MessageFormat)  # of chats
    return_token_ids: bool = False
    shows_token_ids: bool = False  # instead of the texts of tokens in log-probabilities
    ignored_fields: tuple[str, ...] = ()  # names that mean nothing here
    settings: Json = field(default_factory=dict)  # that the response repeats

    @property
    def num_choices(self) -> int:
        """The number of choices for each prompt."""
        return self.requests[0].params.n

    @property
    def shows_specials(self) -> bool:
        """Whether special tokens are part of the text."""
        return not self.requests[0].params.skip_special_tokens


class RequestParser:
    """Reads bodies for a model. Its methods raise RequestError, or ApiError for an unknown model.
    They tokenize and render templates, which takes time: servers call them in a thread.
    """

    def __init__(
        self,
        model: ServedModel,
        max_logprobs: int = 20,
        strict_fields: bool = False,
        allows_tools: bool = True,
    ):
        """`strict_fields`: an unknown name of a field is an error. Unless `allows_tools`, `tools`
        are errors.
        """
        self.model = model
        self.allows_tools = allows_tools
        self.max_logprobs = max_logprobs
        self.strict_fields = strict_fields

    def completion(self, body: JsonBody) -> ApiRequest:
        """The body of /v1/completions."""
        request = body.parse(CompletionRequest, self.strict_fields)
        self.check_num_logprobs("logprobs", request.logprobs)
        self.check_prompt_logprobs(request)
        fields = self.sampling_fields(request) | {"logprobs": request.logprobs}
        self.check_num_sequences(len(request.prompt), 1 if request.n is None else request.n)
        token_ids = []
        count = self.max_prompt_tokens(request)
        for each in request.prompt:
            if isinstance(each, str):
                token_ids.append(self.encode(each, request.add_special_tokens is not False, count))
            else:
                token_ids.append(each if count is None else each[-count:])
        params = SamplingParams(**fields, prompt_logprobs=request.prompt_logprobs)
        requests = []
        for index, ids in enumerate(token_ids):
            default = min(DEFAULT_MAX_TOKENS, self.remaining(ids))
            max_tokens = self.max_tokens(request, len(ids), default, int(not request.echo))
            if request.echo and (request.logprobs is not None or not max_tokens):
                num_logprobs = max(request.logprobs or 0, request.prompt_logprobs or 0)
                params = params.with_valid(prompt_logprobs=num_logprobs)
            seed = prompt_seed(params.seed, index)
            own_params = params.with_valid(max_new_tokens=max_tokens, seed=seed)
            requests.append(self.generation_request(request, ids, own_params))
        echoes = tuple(
            each
            if isinstance(each, str) and request.truncate_prompt_tokens is None
            else self.model.tokenizer.decode(ids)
            for each, ids in zip(request.prompt, token_ids, strict=True)
            if request.echo
        )
        parsed = self.api_request(request, requests)
        return replace(parsed, is_chat=False, echoes=echoes, logprobs=request.logprobs)

    def chat(self, body: JsonBody) -> ApiRequest:
        """The body of /v1/chat/completions."""
        return self.parse_chat(body.parse(ChatRequest, self.strict_fields))

    def responses(self, body: JsonBody) -> ApiRequest:
        """The body of /v1/responses."""
        request = body.parse(ResponsesRequest, self.strict_fields)
        try:
            parsed = self.parse_chat(request.to_chat())
        except RequestError as error:
            if error.param != "messages":
                raise
            raise RequestError(str(error), "input", error.code) from error
        settings = request.repeated_fields(parsed.requests[0].params)
        return replace(parsed, ignored_fields=request.ignored_fields, settings=settings)

    def parse_chat(self, request: ChatRequest) -> ApiRequest:
        self.check_prompt_logprobs(request)
        self.check_num_logprobs("top_logprobs", request.top_logprobs)
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        logprobs = request.top_logprobs if request.logprobs else None
        fields = self.sampling_fields(request) | {"logprobs": logprobs}
        fields["prompt_logprobs"] = request.prompt_logprobs
        if request.tools and not self.allows_tools:
            raise RequestError("this server takes no tools", "tools", UNSUPPORTED)
        tools = request.tool_options
        text = self.chat_text(request)
        reasoning = self.reasoning(request, text)
        fields["structured_outputs"] = self.chat_constraint(tools, reasoning, request.constraint)
        count = self.max_prompt_tokens(request)
        prompt_ids = self.encode(text, request.add_special_tokens is True, count)
        remaining = self.remaining(prompt_ids)
        max_tokens = self.max_tokens(request, len(prompt_ids), remaining, at_least=1)
        params = SamplingParams(max_new_tokens=max_tokens, **fields)
        message_format = MessageFormat(tools, reasoning, self.model.tool_parser)
        special_ids = self.model.special_ids
        tags = tuple(tag for tag in message_format.tags if tag in special_ids)
        generation_request = replace(
            self.generation_request(request, prompt_ids, params),
            visible_token_ids=frozenset(special_ids[tag] for tag in tags),
            reasoning=reasoning.span,
        )
        if params.skip_special_tokens:
            message_format = replace(message_format, hidden_tags=tags)
        parsed = self.api_request(request, [generation_request])
        return replace(parsed, logprobs=logprobs, format=message_format)

    def check_num_logprobs(self, name: str, count: int | None) -> None:
        """Raises RequestError for more of the most likely tokens at a position than are allowed."""
        if count is not None:
            check_range(name, count, 0, self.max_logprobs, whole=True)

    def check_prompt_logprobs(self, request: ChoiceFields) -> None:
        self.check_num_logprobs("prompt_logprobs", request.prompt_logprobs)
        if request.prompt_logprobs is not None and request.stream:
            raise RequestError("prompt_logprobs needs stream=false", "prompt_logprobs")

    def reasoning(self, request: ChatRequest, prompt: str) -> Reasoning:
        """`prompt` is the text of the conversation."""
        variables = {**self.model.template_defaults, **request.chat_template_kwargs}
        return Reasoning.from_prompt(
            self.model.reasoning_parser,
            prompt,
            continues=request.continue_final_message,
            is_wanted=bool(request.reasoning_effort)
            or any(variables.get(name) is True for name in ("enable_thinking", "thinking")),
        )

    def chat_constraint(
        self, tools: ToolOptions, reasoning: Reasoning, wanted: StructuredOutputs | None
    ) -> StructuredOutputs | None:
        """The grammar of a message: of a required call, or the one that the request wants. It
        begins after the reasoning. A response_format is about content, which a required call has
        not.
        """
        constraint = tools.constraint()
        if constraint is None:
            constraint = wanted
        elif wanted is not None and wanted.param not in CONTENT_FORMATS:
            raise RequestError("a required call has a format of its own", "tool_choice")
        if constraint is None:
            return None
        return replace(constraint, preamble=reasoning.preamble(self.model.tokenizer))

    def chat_text(self, request: ConversationFields) -> str:
        """The messages of a body as the template writes them."""
        assert request.messages is not None, "the body has a conversation"
        try:
            return self.model.render_chat(
                request.messages,
                request.template_variables(),
                request.adds_generation_prompt,
                request.continue_final_message,
            )
        except RequestError:
            raise
        except TemplateRefusal as error:
            message = f"the chat template of this model refuses the messages: {error.reason}"
            raise RequestError(message[:MAX_MESSAGE], "messages") from error
        except UserError as error:  # the template cannot be run
            raise RequestError(str(error)[:MAX_MESSAGE], "messages") from error

    def check_num_sequences(self, num_prompts: int, n: int) -> None:
        """Raises RequestError for several prompts that even an idle server cannot queue."""
        check_range("n", n, 1, MAX_N, whole=True)
        capacity = self.model.engine.capacity
        if num_prompts > 1 and num_prompts * n > capacity:
            choices = f" with {n} choices each" if n > 1 else ""
            raise RequestError(
                f"prompt has {num_prompts} prompts{choices}, and this server queues {capacity} "
                "sequences at most: send fewer at a time",
                "prompt",
            )

    def sampling_fields(self, request: ChoiceFields) -> Json:
        """Fields of SamplingParams. Without a seed, every request has another one."""
        given = given_sampling(request) | {"structured_outputs": request.constraint}
        if "seed" in given:
            check_whole_number("seed", given["seed"])
        defaults = {"temperature": DEFAULT_TEMPERATURE, "seed": secrets.randbits(32)}
        return defaults | dict(self.model.sampling_defaults) | given

    def max_tokens(
        self, request: ChoiceFields, prompt_length: int, default: int, at_least: int
    ) -> int:
        name, given = request.token_limit
        count = default if given is None else given
        check_whole_number(name, count)
        if count < at_least:
            raise RequestError(f"{name}={count} must be at least {at_least}", name)
        if prompt_length + count > self.model.max_length:
            raise RequestError(
                f"the maximum length is {self.model.max_length} tokens, but the prompt has "
                f"{prompt_length} tokens, and {name} is {count}",
                None if given is None else name,
                "context_length_exceeded",
            )
        return count

    def remaining(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens the maximum length leaves after a prompt; one if it leaves none."""
        return max(self.model.max_length - len(prompt_ids), 1)

    def encode(self, text: str, adds_specials: bool, count: int | None = None) -> list[int]:
        """The ids of a text, or the last `count` of them. Raises RequestError for a text that is
        too long whatever its tokens are.
        """

        def encode(part: str) -> list[int]:
            return self.model.encode(part, adds_specials)

        if count is not None:
            return encode_end(text, count, encode, self.model.longest_token)
        check_text_length(text, self.model.max_length, self.model.longest_token)
        return encode(text)

    def max_prompt_tokens(self, request: ChoiceFields) -> int | None:
        """`truncate_prompt_tokens`: how many of the last ids of a prompt count; None: all. -1 is
        the maximum length.
        """
        name, count = "truncate_prompt_tokens", request.truncate_prompt_tokens
        if count is None:
            return None
        check_range(name, count, -1, self.model.max_length, whole=True)
        if count == 0:
            raise RequestError(f"{name} must be at least 1, or -1", name)
        return self.model.max_length - 1 if count < 0 else count

    def generation_request(
        self, request: ChoiceFields, prompt_ids: list[int], params: SamplingParams
    ) -> GenerationRequest:
        _, adapter = self.model.find(request.model)
        return GenerationRequest(prompt_ids, params, adapter=adapter, cache_salt=request.cache_salt)

    def api_request(
        self, request: ChoiceFields, requests: Sequence[GenerationRequest]
    ) -> ApiRequest:
        """An ApiRequest with the fields that completions and chats share."""
        options = request.stream_options or ChunkOptions()
        return ApiRequest(
            model=self.model.find(request.model)[0],
            requests=tuple(requests),
            is_chat=True,
            stream=request.stream,
            include_usage=bool(options.include_usage or options.continuous_usage_stats),
            continuous_usage=bool(options.continuous_usage_stats),
            prompt_logprobs=request.prompt_logprobs,
            return_token_ids=request.return_token_ids,
            shows_token_ids=request.return_tokens_as_token_ids,
            ignored_fields=request.ignored_fields,
        )


def check_text_length(text: str, max_length: int, token_chars: int | None) -> None:
    """Raises RequestError for a text that exceeds `max_length` tokens whatever its tokens are. A
    token has `token_chars` characters at most; None: the vocabulary sets no limit.
    """
    at_least = -(-len(text) // (token_chars or MAX_TOKEN_CHARS))
    if at_least > max_length:
        raise RequestError(
            f"the maximum length is {max_length} tokens, but the prompt has at least {at_least} "
            "tokens",
            code="context_length_exceeded",
        )


def encode_end(
    text: str, count: int, encode: Callable[[str], list[int]], token_chars: int | None
) -> list[int]:
    """The last `count` ids of `encode(text)`, from the end of the text alone. Raises RequestError
    if more characters than `count` tokens can have are fewer tokens.
    """
    num_chars = (count + OVERLAP) * USUAL_TOKEN_CHARS
    limit = (count + OVERLAP) * (token_chars or MAX_TOKEN_CHARS) + MAX_WORD_CHARS
    while num_chars < len(text):
        num_chars = min(num_chars, limit)
        start = len(text) - num_chars
        if match := WORD_START.search(text, start, start + MAX_WORD_CHARS):
            start = match.start()
        ids = encode(text[start:])
        if len(ids) >= count + OVERLAP:
            return ids[-count:]
        if num_chars == limit:
            raise RequestError(
                f"the last {limit} characters of the prompt are only {len(ids)} tokens, fewer than "
                f"truncate_prompt_tokens={count}: send less blank or unknown text",
                "truncate_prompt_tokens",
            )
        num_chars *= 4
    return encode(text)[-count:]
