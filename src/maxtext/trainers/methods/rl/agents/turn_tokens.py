"""The tokens of conversations around sampled turns.

Sampled ids are never tokenized again: a text may have several tokenizations, and the
log-probabilities belong to the one that was sampled. Only what stands between two turns is
tokenized: the rest of the model's turn after its end token, the messages that answer it, and the
header of the next turn. It follows a special token, so its tokens do not depend on those before.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.trees import common_prefix_length
from maxtext.common.types import Json
from maxtext.tokenizers import ChatTemplate, Tokenizer
from maxtext.tokenizers.chat import CONTENT_MARK
from maxtext.trainers.methods.rl.agents.environment import Message

USER = {"role": "user", "content": "?"}
SPOKEN = {"role": "assistant", "content": CONTENT_MARK}


class TurnTokens:
    """`schemas`: the tools that the prompt describes. `tags`: special tokens that the text of a
    turn shows. `common_variables`: of the template, for all conversations."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        schemas: Sequence[Json],
        tags: Sequence[str] = (),
        common_variables: Mapping[str, object] | None = None,
    ):
        encoded = map(tokenizer.encode_with_specials, tags)
        self.visible_ids = {ids[0] for ids in encoded if len(ids) == 1} & tokenizer.special_ids
        self.template = template
        self.tokenizer = tokenizer
        self.schemas = schemas
        self.common_variables = dict(common_variables or {})

    def variables(self, others: Mapping[str, object] | None = None) -> dict[str, object]:
        tools = {"tools": list(self.schemas)} if self.schemas else {}
        return {**self.common_variables, **(others or {}), **tools}

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a turn."""
        parts, ids = [], list[int]()
        for token in token_ids:
            if token in self.visible_ids:
                parts += [self.tokenizer.decode(ids), self.tokenizer.id_to_token(token)]
                ids = []
            else:
                ids.append(token)
        return "".join([*parts, self.tokenizer.decode(ids)])

    def prompt(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """The tokens of a conversation up to where the model's turn begins."""
        text = self.template.render(
            messages, add_generation_prompt=True, variables=self.variables(variables)
        )
        return self.tokenizer.encode_with_specials(text)

    def reply(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        with_end: bool = False,
        last_token: int | None = None,
    ) -> list[int]:
        """The tokens after the end token of a turn: messages, and the header of the next turn.
        `with_end`: also the end token, which a turn that a stop string ended does not have.
        `last_token`: the token that the turn ended with, if it is known.

        Raises UserError if the template refuses the messages, ConfigError if its turns end in no
        special token.
        """
        texts = self.render_reply(messages, self.variables(variables))
        turn, whole = map(self.tokens_after_turn, texts)
        turn_specials = [turn[index] for index in self.special_positions(turn)]
        positions = self.special_positions(whole)
        if not positions:
            raise ConfigError(
                f"the chat template of {self.template.origin} ends the model's turn with no "
                "special token, so that the turns of a conversation cannot be separated"
            )
        specials = [whole[index] for index in positions]
        # A template may write other special tokens after a turn that is the last one.
        num_common = common_prefix_length(turn_specials, specials)
        # Some models end a turn with the header of the next one, which they write themselves.
        is_header = num_common < len(specials) and specials[num_common] == last_token
        end = positions[num_common if is_header else max(num_common - 1, 0)]
        has_end = bool(turn_specials) or last_token in (None, whole[end])
        return whole[end + 1 if has_end and not with_end else end :]

    def special_positions(self, ids: Sequence[int]) -> list[int]:
        return [index for index, token in enumerate(ids) if token in self.tokenizer.special_ids]

    def tokens_after_turn(self, text: str) -> list[int]:
        """The tokens of a text after CONTENT_MARK."""
        turn_end = text.rindex(CONTENT_MARK) + len(CONTENT_MARK)
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        return [token for token, (start, _) in zip(ids, offsets, strict=True) if start >= turn_end]

    def render_reply(
        self, messages: Sequence[Message], variables: Mapping[str, object]
    ) -> tuple[str, str]:
        """A conversation that ends with a turn of CONTENT_MARK, and the same followed by `messages`
        and the header of the next turn."""
        turns = [SPOKEN, calling_turn(messages)]
        if messages and messages[0]["role"] == "tool":
            turns = [calling_turn(messages), calling_turn(messages, as_text=True), SPOKEN]
        conversations = [
            each
            for turn in turns
            for each in (([USER, turn], False), ([USER, turn, *messages], True))
        ]
        prompts = [([USER], False), ([USER], True)]
        bare, headed, *results = self.template.run([*prompts, *conversations], variables)
        for alone, whole in zip(results[::2], results[1::2], strict=True):
            if isinstance(alone, UserError) or isinstance(whole, UserError):
                continue
            if CONTENT_MARK in alone.text and CONTENT_MARK in whole.text:
                # If the template always writes the header of the next turn, the end is unknown.
                return CONTENT_MARK if bare == headed else alone.text, whole.text
        refusal = next((each for each in results if isinstance(each, UserError)), None)
        raise refusal or ConfigError(
            f"the chat template of {self.template.origin} does not show the model's turns"
        )


def calling_turn(messages: Sequence[Message], as_text: bool = False) -> Message:
    """A turn with the calls that `messages` begin with the results of, or with one call. Some
    templates accept the message of a tool only after such a turn. `as_text`: arguments are JSON
    texts, which some templates expect.
    """
    results = [*takewhile(lambda message: message["role"] == "tool", messages)] or [{}]
    arguments = {"argument": CONTENT_MARK}
    calls = [
        {
            "type": "function",
            "id": result.get("tool_call_id") or f"call{index:05d}",
            "function": {
                "name": result.get("name") or "tool",
                "arguments": json.dumps(arguments) if as_text else arguments,
            },
        }
        for index, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
