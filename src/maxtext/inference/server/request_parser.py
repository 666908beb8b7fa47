"""From the body of a request to what the engine generates, for completions and chats."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from maxtext.common.errors import UserError
from maxtext.inference.llm import prompt_seed
from maxtext.inference.parsers.reasoning import Reasoning
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling_params import MAX_N, SamplingParams
from maxtext.inference.server.bodies import (
    Body,
    flag,
    object_field,
    parse_messages,
    parse_prompts,
    text_field,
)
from maxtext.inference.server.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    GUIDED_FIELDS,
    SAMPLING_FIELDS,
    UNSUPPORTED,
    check_names,
)
from maxtext.inference.server.messages import MessageFormat
from maxtext.inference.server.model import ServedModel
from maxtext.inference.server.text_limits import check_text_length, encode_end
from maxtext.inference.server.tools import ToolOptions, parse_tools
from maxtext.inference.structured_outputs import StructuredOutputs, parse_response_format
from maxtext.inference.validation import RequestError, check_range, check_whole_number, shorten
from maxtext.tokenizers.chat import TemplateRefusal

DEFAULT_TEMPERATURE = 1.0  # of requests, unless generation_config.json has another
MAX_MESSAGE = 1000  # characters of an error of the template
DEFAULT_MAX_TOKENS = 16  # of completions; of chats, what the maximum length leaves


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
    settings: Body = field(default_factory=dict)  # that the response repeats

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

    def completion(self, body: Body) -> ApiRequest:
        """The body of /v1/completions."""
        ignored = check_names(body, COMPLETION_FIELDS, "/v1/completions", self.strict_fields)
        echo = flag(body, "echo")
        logprobs = body.get("logprobs")
        if logprobs is not None:
            check_range("logprobs", logprobs, 0, self.max_logprobs, whole=True)
        fields = self.sampling_fields(body) | {"logprobs": logprobs}
        num_prompt_logprobs = self.prompt_logprobs(body)
        adds_specials = flag(body, "add_special_tokens", default=True)
        prompts = parse_prompts(body)
        self.check_num_sequences(len(prompts), body.get("n", 1))
        token_ids = []
        count = self.max_prompt_tokens(body)
        for each in prompts:
            if isinstance(each, str):
                token_ids.append(self.encode(each, adds_specials, count))
            else:
                token_ids.append(each if count is None else each[-count:])
        params = SamplingParams(**fields, prompt_logprobs=num_prompt_logprobs)
        requests = []
        for index, ids in enumerate(token_ids):
            default = min(DEFAULT_MAX_TOKENS, self.remaining(ids))
            max_tokens = self.max_tokens(body, len(ids), default, int(not echo))
            if echo and (logprobs is not None or not max_tokens):
                count = max(logprobs or 0, num_prompt_logprobs or 0)
                params = params.with_valid(prompt_logprobs=count)
            seed = prompt_seed(params.seed, index)
            own_params = params.with_valid(max_new_tokens=max_tokens, seed=seed)
            requests.append(self.generation_request(body, ids, own_params))
        echoes = tuple(
            each
            if isinstance(each, str) and "truncate_prompt_tokens" not in body
            else self.model.tokenizer.decode(ids)
            for each, ids in zip(prompts, token_ids, strict=True)
            if echo
        )
        return self.api_request(
            body,
            requests,
            ignored,
            echoes=echoes,
            logprobs=logprobs,
            prompt_logprobs=num_prompt_logprobs,
        )

    def chat(self, body: Body) -> ApiRequest:
        """The body of /v1/chat/completions."""
        ignored = check_names(body, CHAT_FIELDS, "/v1/chat/completions", self.strict_fields)
        if flag(body, "echo"):
            raise RequestError("echo is for /v1/completions", "echo", UNSUPPORTED)
        num_prompt_logprobs = self.prompt_logprobs(body)
        wants_logprobs = flag(body, "logprobs")
        num_top = body.get("top_logprobs", 0)
        check_range("top_logprobs", num_top, 0, self.max_logprobs, whole=True)
        if num_top and not wants_logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        logprobs = num_top if wants_logprobs else None
        fields = self.sampling_fields(body) | {"logprobs": logprobs}
        fields["prompt_logprobs"] = num_prompt_logprobs
        if body.get("tools") and not self.allows_tools:
            raise RequestError("this server takes no tools", "tools", UNSUPPORTED)
        tools = parse_tools(body)
        text = self.chat_text(body, tools)
        reasoning = self.reasoning(body, text)
        fields["structured_outputs"] = self.chat_constraint(
            tools, reasoning, fields.get("structured_outputs")
        )
        adds_specials = flag(body, "add_special_tokens")
        prompt_ids = self.encode(text, adds_specials, self.max_prompt_tokens(body))
        max_tokens = self.max_tokens(body, len(prompt_ids), self.remaining(prompt_ids), at_least=1)
        params = SamplingParams(max_new_tokens=max_tokens, **fields)
        message_format = MessageFormat(tools, reasoning, self.model.tool_parser)
        special_ids = self.model.special_ids
        tags = tuple(tag for tag in message_format.tags if tag in special_ids)
        request = replace(
            self.generation_request(body, prompt_ids, params),
            visible_token_ids=frozenset(special_ids[tag] for tag in tags),
            reasoning=reasoning.span,
        )
        if params.skip_special_tokens:
            message_format = replace(message_format, hidden_tags=tags)
        return self.api_request(
            body,
            [request],
            ignored,
            is_chat=True,
            logprobs=logprobs,
            prompt_logprobs=num_prompt_logprobs,
            message_format=message_format,
        )

    def prompt_logprobs(self, body: Body) -> int | None:
        """How many of the most likely tokens a response has at each position of the prompt."""
        count = body.get("prompt_logprobs")
        if count is not None:
            check_range("prompt_logprobs", count, 0, self.max_logprobs, whole=True)
            if flag(body, "stream"):
                raise RequestError("prompt_logprobs needs stream=false", "prompt_logprobs")
        return count

    def reasoning(self, body: Body, prompt: str) -> Reasoning:
        """`prompt` is the text of the conversation."""
        variables = {**self.model.template_defaults, **object_field(body, "chat_template_kwargs")}
        return Reasoning.from_prompt(
            self.model.reasoning_parser,
            prompt,
            continues=flag(body, "continue_final_message"),
            is_wanted=bool(body.get("reasoning_effort"))
            or any(variables.get(name) is True for name in ("enable_thinking", "thinking")),
        )

    def chat_constraint(
        self, tools: ToolOptions, reasoning: Reasoning, wanted: Any
    ) -> StructuredOutputs | None:
        """The grammar of a message: of a required call, or the one that the request wants. It
        begins after the reasoning. A response_format is about content, which a required call has
        not.
        """
        constraint = tools.constraint()
        wanted = None if wanted is None else StructuredOutputs.parse(wanted)
        if constraint is None:
            constraint = wanted
        elif wanted is not None and wanted.param != "response_format":
            raise RequestError("a required call has a format of its own", "tool_choice")
        if constraint is None:
            return None
        return replace(constraint, preamble=reasoning.preamble(self.model.tokenizer))

    def chat_text(self, body: Body, tools: ToolOptions) -> str:
        """The messages of a body as the template writes them."""
        variables = dict(object_field(body, "chat_template_kwargs"))
        if "tools" in variables:
            raise RequestError("chat_template_kwargs may not set tools", "chat_template_kwargs")
        if tools.definitions:
            variables["tools"] = list(tools.definitions)
        effort = text_field(body, "reasoning_effort")
        if effort:
            variables = {"reasoning_effort": effort, **variables}
        if effort == "none":
            variables = {"enable_thinking": False, **variables}
        continues = flag(body, "continue_final_message")
        add_prompt = flag(body, "add_generation_prompt", default=not continues)
        if continues and add_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false",
                "continue_final_message",
            )
        messages = parse_messages(body)
        try:
            return self.model.render_chat(messages, variables, add_prompt, continues)
        except RequestError:
            raise
        except TemplateRefusal as error:
            message = f"the chat template of this model refuses the messages: {error.reason}"
            raise RequestError(message[:MAX_MESSAGE], "messages") from error
        except UserError as error:  # the template cannot be run
            raise RequestError(str(error)[:MAX_MESSAGE], "messages") from error

    def check_num_sequences(self, num_prompts: int, n: Any) -> None:
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

    def sampling_fields(self, body: Body) -> dict[str, Any]:
        """Fields of SamplingParams. Without a seed, every request has another one."""
        given = {name: body[name] for name in SAMPLING_FIELDS if name in body}
        if "best_of" in body:
            check_whole_number("best_of", body["best_of"])
            if body["best_of"] != body.get("n", 1):
                raise RequestError("best_of must be equal to n", "best_of")
        names = ("response_format", "structured_outputs", *GUIDED_FIELDS)
        constraints = [name for name in names if body.get(name) not in (None, {"type": "text"})]
        if len(constraints) > 1:
            raise RequestError(f"give either {constraints[0]} or {constraints[1]}", constraints[0])
        for name in constraints:
            if name == "response_format":
                given["structured_outputs"] = parse_response_format(body[name])
            elif name in GUIDED_FIELDS:
                given["structured_outputs"] = StructuredOutputs.from_kind(
                    GUIDED_FIELDS[name], body[name], param=name, name=name
                )
        if "seed" in given:
            check_whole_number("seed", given["seed"])
        defaults = {"temperature": DEFAULT_TEMPERATURE, "seed": secrets.randbits(32)}
        return defaults | dict(self.model.sampling_defaults) | given

    def max_tokens(self, body: Body, prompt_length: int, default: int, at_least: int) -> int:
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        count = body.get(name, default)
        check_whole_number(name, count)
        if count < at_least:
            raise RequestError(f"{name}={count} must be at least {at_least}", name)
        if prompt_length + count > self.model.max_length:
            raise RequestError(
                f"the maximum length is {self.model.max_length} tokens, but the prompt has "
                f"{prompt_length} tokens, and {name} is {count}",
                name if name in body else None,
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

    def max_prompt_tokens(self, body: Body) -> int | None:
        """`truncate_prompt_tokens`: how many of the last ids of a prompt count; None: all. -1 is
        the maximum length.
        """
        name = "truncate_prompt_tokens"
        count = body.get(name)
        if count is None:
            return None
        check_range(name, count, -1, self.model.max_length, whole=True)
        if count == 0:
            raise RequestError(f"{name} must be at least 1, or -1", name)
        return self.model.max_length - 1 if count < 0 else count

    def generation_request(
        self, body: Body, prompt_ids: list[int], params: SamplingParams
    ) -> GenerationRequest:
        _, adapter = self.model.find(body.get("model"))
        salt = text_field(body, "cache_salt")
        return GenerationRequest(prompt_ids, params, adapter=adapter, cache_salt=salt)

    def api_request(
        self,
        body: Body,
        requests: Sequence[GenerationRequest],
        ignored: tuple[str, ...],
        is_chat: bool = False,
        echoes: tuple[str, ...] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        message_format: MessageFormat | None = None,
    ) -> ApiRequest:
        continuous, include_usage = parse_stream_options(
            body, "continuous_usage_stats", "include_usage"
        )
        return ApiRequest(
            model=self.model.find(body.get("model"))[0],
            requests=tuple(requests),
            is_chat=is_chat,
            stream=flag(body, "stream"),
            include_usage=include_usage or continuous,
            continuous_usage=continuous,
            echoes=echoes,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            format=message_format or MessageFormat(),
            return_token_ids=flag(body, "return_token_ids"),
            shows_token_ids=flag(body, "return_tokens_as_token_ids"),
            ignored_fields=ignored,
        )


def parse_stream_options(body: Body, *names: str) -> list[bool]:
    """The values of these fields of `stream_options`. Raises RequestError for
    `include_obfuscation`, which pads events.
    """
    options = object_field(body, "stream_options")
    if "stream_options" in body and not flag(body, "stream"):
        raise RequestError("stream_options needs stream=true", "stream_options")
    for name in (*names, "include_obfuscation"):
        if not isinstance(options.get(name), bool | None):
            raise RequestError(
                f"stream_options.{name} must be true or false, not {shorten(options[name])}",
                "stream_options",
            )
    if options.get("include_obfuscation"):
        raise RequestError(
            "stream_options.include_obfuscation is not supported", "stream_options", UNSUPPORTED
        )
    return [bool(options.get(name)) for name in names]
