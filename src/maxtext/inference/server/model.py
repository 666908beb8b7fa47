"""The model behind the server: its names, its engine, and its texts as token ids."""

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from maxtext.common.files import read_json_object
from maxtext.common.types import Json
from maxtext.inference.async_engine import AsyncEngine
from maxtext.inference.llm import LLM
from maxtext.inference.server.errors import NOT_FOUND, ApiError
from maxtext.inference.server.messages import Message
from maxtext.inference.validation import RequestError, shorten
from maxtext.tokenizers import ChatTemplate, Tokenizer
from maxtext.tokenizers.chat import RESERVED_VARIABLES
from maxtext.tokenizers.load import concatenates, text_bytes

# Fields of generation_config.json that are defaults of requests.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Log-probabilities have up to 21 tokens at each position, which often recur.
NUM_CACHED_TOKENS = 32_768
DEVELOPER = "developer"  # the role that OpenAI's newer models have in place of `system`


@dataclass
class ServedModel:
    """`names` are what `model` may be, besides the names of adapters; responses have the first."""

    llm: LLM
    engine: AsyncEngine
    tokenizer: Tokenizer
    names: Sequence[str]
    chat_template: ChatTemplate | None = None
    template_defaults: Json = field(default_factory=dict)
    sampling_defaults: Json = field(default_factory=dict)
    tool_parser: str = "none"  # of `tool_calls.TOOL_PARSERS`, for tool_choice="auto"
    reasoning_parser: str = "none"  # of `reasoning.REASONING_PARSERS`
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_length(self) -> int:
        """Of prompt and completion together, in tokens."""
        return self.engine.engine.max_length

    def find(self, name: object, param: str = "model") -> tuple[str, str]:
        """(name in responses, adapter) of the `model` of a request; None is the first. Raises
        ApiError for an unknown one and RequestError for one that is no text, with the field
        `param`.
        """
        if name is not None and not isinstance(name, str):
            raise RequestError(f"{param} must be text, not {shorten(name)}", param)
        if name is None or name in self.names:
            return self.names[0], ""
        if name in self.llm.adapters.loaded:
            return name, name
        raise ApiError(
            404,
            f"there is no model {name[:100]!r}; GET /v1/models lists them",
            NOT_FOUND,
            param=param,
            code="model_not_found",
        )

    def card(self, name: str) -> Json:
        """A model as /v1/models describes it."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "maxtext",
            "root": self.names[0],
            "parent": None if name in self.names else self.names[0],
            "max_model_len": self.max_length,
        }

    def all_names(self) -> list[str]:
        return [*self.names, *self.llm.adapters.loaded]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if add_special_tokens and self.llm.config.add_bos:
            return self.tokenizer.encode_prompt(text)
        return self.tokenizer.encode_with_specials(text)

    def check_token_range(self, name: str, token_ids: Sequence[int]) -> None:
        """Raises RequestError for the first id outside the vocabulary of the model."""
        size = self.llm.config.vocab_size
        outside = next((token for token in token_ids if token >= size), None)
        if outside is not None:
            raise RequestError(
                f"{name} has {shorten(outside)}, which is outside the vocabulary, 0 to {size - 1}",
                name,
            )

    def render_chat(
        self,
        messages: Sequence[Message],
        variables: Json,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation. With `continue_final_message` it ends with the content of
        its last message. Raises UserError if the template refuses it.
        """
        template = self.chat_template
        if template is None:
            raise RequestError(
                "this model came without a chat template: use /v1/completions", "messages"
            )
        reserved = RESERVED_VARIABLES.union(template.special_tokens) - {"tools"}
        if names := sorted(reserved.intersection(variables)):
            raise RequestError(
                f"chat_template_kwargs may not set {names[0]}", "chat_template_kwargs"
            )
        variables = {**self.template_defaults, **variables}
        if DEVELOPER not in template.source_for(variables):  # it would leave the message out
            messages = [
                message._replace(role="system") if message.role == DEVELOPER else message
                for message in messages
            ]
        conversation = [message.to_json() for message in messages]
        if continue_final_message:
            return template.render_open(conversation, variables)
        return template.render(conversation, add_generation_prompt, variables)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens of the vocabulary by name."""
        return {self.tokenizer.id_to_token(token): token for token in self.tokenizer.special_ids}

    @cached_property
    def longest_token(self) -> int | None:
        """The most characters that a token can stand for; None if that has no limit, since an
        unknown token may stand for any number of them.
        """
        tokenizer = self.tokenizer
        if "unk_token" in tokenizer.special_tokens or not concatenates(tokenizer):
            return None
        return max(len(tokenizer.id_to_token(token)) for token in range(tokenizer.vocab_size))

    @cached_property
    def token_text(self) -> Callable[[int], str]:
        """A token as text: what it adds to a text, or for special tokens its name. A part of a
        character is written as bytes:\\xNN.
        """
        return lru_cache(NUM_CACHED_TOKENS)(self.read_token_text)

    @cached_property
    def token_bytes(self) -> Callable[[int, bool], bytes]:
        """The bytes that a token adds to a text; special tokens add a name if the flag is true."""
        return lru_cache(NUM_CACHED_TOKENS)(self.read_token_bytes)

    def read_token_text(self, token: int) -> str:
        data = text_bytes(self.tokenizer, token)
        if not data:
            return self.tokenizer.id_to_token(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def read_token_bytes(self, token: int, shows_specials: bool) -> bytes:
        if shows_specials and token in self.tokenizer.special_ids:
            return self.tokenizer.id_to_token(token).encode()
        return text_bytes(self.tokenizer, token)


def read_sampling_defaults(llm: LLM) -> Json:
    """The sampling defaults in the model's generation_config.json."""
    for path in llm.origin[0]:
        if path.name == "generation_config.json":
            settings = read_json_object(path)
            return {
                name: settings[name] for name in SAMPLING_DEFAULTS if settings.get(name) is not None
            }
    return {}


# Seeded by the system once: reading its randomness for each id would release the interpreter, which
# is then the engine's for a while.
GENERATOR = random.Random()
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def new_id() -> str:
    """32 random hexadecimal digits. They identify, and protect nothing."""
    return f"{GENERATOR.getrandbits(128):032x}"


def is_request_id(text: str) -> bool:
    """Whether a client may name its request so."""
    return REQUEST_ID.fullmatch(text) is not None
