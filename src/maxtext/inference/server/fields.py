"""The names of fields of requests: those that act, those without an effect, and those that are
refused because they would change the completion or the response.

They are the fields of OpenAI's API and of vLLM's protocol.
"""

from typing import Any

from maxtext.inference.server.bodies import Body
from maxtext.inference.validation import RequestError

UNSUPPORTED = "unsupported_parameter"  # the code of an error
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
)
# Former names of the kinds of structured_outputs.
GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Of fields that are not supported, the values with which they do nothing.
NEUTRAL_VALUES: tuple[Any, ...] = (None, False, 0, "", [])
NEUTRAL_OBJECTS: tuple[Any, ...] = (None, {})
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("suffix", "use_beam_search", "early_stopping", "audio", "prediction"),
            *("web_search_options", "priority", "chat_template", "functions", "documents"),
            *("prompt_embeds", "thinking_token_budget", "logits_processors"),
            *("guided_whitespace_pattern", "structural_tag", "repetition_detection"),
            *("watermarking", "logprob_token_ids", "routed_experts_prompt_start"),
            *("return_token_offsets", "return_prompt_text", "enable_response_messages"),
        ),
        NEUTRAL_VALUES,
    ),
    **dict.fromkeys(
        (
            *("mm_processor_kwargs", "media_io_kwargs", "vllm_xargs", "kv_transfer_params"),
            "ec_transfer_params",
        ),
        NEUTRAL_OBJECTS,
    ),
    "modalities": (None, [], ["text"]),
    "length_penalty": (None, 1),
    "function_call": (None, "none", "auto"),  # without `functions`
    "include_reasoning": (None, True),
    "truncation_side": (None, "left"),
}
# Accepted without an effect on the completion.
INERT_FIELDS = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "verbosity",
    "request_id",  # it names the request
    "session_id",
    "stream_interval",  # how many tokens an event has depends on the engine's steps
    "return_mm_kwargs",  # of images, which prompts do not have
    "guided_decoding_backend",
    "spaces_between_special_tokens",  # there are none in texts
)
COMMON_FIELDS = (
    "model",
    "max_tokens",
    "max_completion_tokens",
    "best_of",
    "logprobs",
    "stream",
    "stream_options",
    "response_format",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
    "add_special_tokens",
    "prompt_logprobs",
    "cache_salt",
    "echo",
    *GUIDED_FIELDS,
    *SAMPLING_FIELDS,
    *UNSUPPORTED_FIELDS,
    *INERT_FIELDS,
)
COMPLETION_FIELDS = frozenset(("prompt", *COMMON_FIELDS))
CHAT_FIELDS = frozenset(
    (
        "messages",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "reasoning_effort",
        *COMMON_FIELDS,
    )
)
# Fields of /v1/responses that mean the same in a chat.
RESPONSES_CHAT_FIELDS = (
    *("model", "stream", "parallel_tool_calls", "chat_template_kwargs", "cache_salt"),
    *("add_special_tokens", *GUIDED_FIELDS),
    *(name for name in SAMPLING_FIELDS if name != "n"),
)
# Without them a conversation, or another thing that the client relies on, would be lost.
CONVERSATION_FIELDS = (
    *("previous_response_id", "background", "conversation", "prompt"),
    *("previous_input_messages", "previous_response"),
)
RESPONSES_FIELDS = frozenset(
    (
        *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text"),
        *("reasoning", "include", "client_metadata", "stream_options", "truncation"),
        *("top_logprobs", "prompt_logprobs", "max_tool_calls"),
        *("context_management", "moderation"),
        *RESPONSES_CHAT_FIELDS,
        *CONVERSATION_FIELDS,
        *UNSUPPORTED_FIELDS,
        *INERT_FIELDS,
    )
)
# A body of a completion or a chat has the tokens of its prompt. It may not be cut.
TOKENIZE_FIELDS = (COMPLETION_FIELDS | CHAT_FIELDS | {"return_token_strs"}) - {
    "truncate_prompt_tokens"
}
DETOKENIZE_FIELDS = frozenset(("model", "tokens"))
GENERATION_FIELDS = COMPLETION_FIELDS | CHAT_FIELDS | RESPONSES_FIELDS
# Values with which a field does nothing where it does not belong, besides NEUTRAL_VALUES.
MISPLACED_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "truncation": ("disabled",),
    "add_generation_prompt": (True,),
}


def check_names(
    body: Body, known: frozenset[str], endpoint: str, is_strict: bool = False
) -> tuple[str, ...]:
    """The names of fields that mean nothing here. Raises RequestError for fields that would change
    the completion or the response and are not supported by this endpoint, and with `is_strict` for
    all others that are unknown.
    """
    for name, neutral_values in UNSUPPORTED_FIELDS.items():
        # An empty object may be a value: `web_search_options: {}` asks for a search.
        if body.get(name) not in neutral_values:
            raise RequestError(f"{name} is not supported", name, UNSUPPORTED)
    unknown = sorted(set(body) - known)
    for name in GENERATION_FIELDS.intersection(unknown):
        is_inert = name in INERT_FIELDS or name in UNSUPPORTED_FIELDS
        neutral = (*NEUTRAL_VALUES, {}, *MISPLACED_VALUES.get(name, ()))
        if not is_inert and body[name] not in neutral:
            raise RequestError(f"{name} is no field of {endpoint}", name, UNSUPPORTED)
    unknown = [name for name in unknown if name not in GENERATION_FIELDS]
    if unknown and is_strict:
        raise RequestError(f"unknown field {unknown[0][:60]!r}", unknown[0][:60])
    return tuple(unknown)
