"""The tokens of conversations around sampled turns.

Sampled ids are never tokenized again: a text may have several tokenizations, and the
log-probabilities belong to the one that was sampled. Only what stands between two turns is
tokenized: the rest of the model's turn after its end token, the messages that answer it, and the
header of the next turn. It follows a special token, so its tokens do not depend on those before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from maxtext.common.errors import ConfigError, UserError
from maxtext.tokenizers import ChatTemplate, Tokenizer
from maxtext.trainers.rl.agents.environment import Message

MARK = "@maxtext-turn@"
USER = {"role": "user", "content": "?"}
SPOKEN = {"role": "assistant", "content": MARK}
# Some templates accept the message of a tool only after a turn with its call.
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "call00000",
            "function": {"name": "tool", "arguments": {"argument": MARK}},
        }
    ],
}


class TurnTokens:
    """`schemas`: the tools that the prompt describes. `tags`: special tokens that the text of a
    turn shows. `common_variables`: of the template, for all conversations."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        schemas: Sequence[Mapping[str, Any]],
        tags: Sequence[str] = (),
        common_variables: Mapping[str, Any] | None = None,
    ):
        encoded = map(tokenizer.encode_with_specials, tags)
        self.visible_ids = {ids[0] for ids in encoded if len(ids) == 1} & tokenizer.special_ids
        self.template = template
        self.tokenizer = tokenizer
        self.schemas = schemas
        self.common_variables = dict(common_variables or {})

    def variables(self, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
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
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens of a conversation up to where the model's turn begins."""
        text = self.template.render(
            messages, add_generation_prompt=True, variables=self.variables(variables)
        )
        return self.tokenizer.encode_with_specials(text)

    def reply(self, messages: Sequence[Message], with_end: bool = False) -> list[int]:
        """The tokens after the end token of a turn: messages, and the header of the next turn.
        `with_end`: also the end token, which a turn that a stop string ended does not have.

        Raises UserError if the template refuses the messages, ConfigError if its turns end in no
        special token.
        """
        text = self.render_reply(messages)
        turn_end = text.rindex(MARK) + len(MARK)
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        ends = (
            index
            for index, (token, (start, _)) in enumerate(zip(ids, offsets, strict=True))
            if start >= turn_end and token in self.tokenizer.special_ids
        )
        end = next(ends, None)
        if end is None:
            raise ConfigError(
                f"the chat template of {self.template.origin} ends the model's turn with no "
                "special token, so that the turns of a conversation cannot be separated"
            )
        return ids[end if with_end else end + 1 :]

    def render_reply(self, messages: Sequence[Message]) -> str:
        """A conversation of a turn that is MARK, `messages`, and the header of the next turn."""
        conversations = [([USER, turn, *messages], True) for turn in (SPOKEN, CALLED)]
        rendered = self.template.run(conversations, self.variables())
        for result in rendered:
            if not isinstance(result, UserError) and MARK in result.text:
                return result.text
        refusal = next((each for each in rendered if isinstance(each, UserError)), None)
        raise refusal or ConfigError(
            f"the chat template of {self.template.origin} does not show the model's turns"
        )
