"""Conversations that the engine and environments hold: turns of the model and what answers them.

A conversation is one sequence of tokens. The tokens of the model's turns are sampled and trained
on; those of the template and of the environment are context. All turns of a conversation have the
seed of its first turn, since the position of a token is part of its key. The environments that have
to answer do so at the same time, and the engine goes on when all have: time does not decide which
sequences share a batch, so that a resumed run samples the same bits.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from maxtext.common.errors import UserError
from maxtext.inference.requests import GenerationRequest
from maxtext.input_pipeline.row_forms import template_variables
from maxtext.input_pipeline.user_code import run_failure
from maxtext.tokenizers import Tokenizer
from maxtext.trainers.methods.rl.agents.environment import (
    Environment,
    InvalidResult,
    Message,
    Row,
    Step,
    check_start,
    check_step,
)
from maxtext.trainers.methods.rl.agents.tools import ToolEnvironment, run_in_threads
from maxtext.trainers.methods.rl.agents.turn_tokens import TurnTokens
from maxtext.trainers.methods.rl.rollout import Rollout

Result = TypeVar("Result")
TOO_MANY_TURNS = "turns"  # the finish reason of a conversation that max_turns ended


class TurnSampler(Protocol):
    """Samples turns; see `rollout.Sampler`."""

    def add(self, index: int, request: GenerationRequest) -> None: ...

    def step(self) -> dict[int, Rollout]: ...


@dataclass(frozen=True)
class ConversationRollout(Rollout):
    """`token_ids` are all tokens after the prompt, `trained_on` those of the model among them, to
    which `log_probs` belong. `turns` are the texts of the model, `environment_reward` is the sum
    over its steps."""

    turns: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    environment_reward: float | None = None

    def text(self, tokenizer: Tokenizer) -> str:
        return "\n".join(self.turns)


@dataclass
class Conversation:
    """A conversation that goes on. `request`: that of its first turn, whose prompt is not used.
    `prompt_ids`: empty if they are those of the messages that the environment begins with.
    `variables`: those of its row for the chat template."""

    index: int
    row: Row
    environment: Environment
    request: GenerationRequest
    messages: list[Message] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    variables: Mapping[str, object] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    trained_on: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def rollout(self, finish_reason: str) -> ConversationRollout:
        return ConversationRollout(
            self.prompt_ids,
            tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            finish_reason=finish_reason,
            trained_on=tuple(self.trained_on),
            turns=tuple(self.turns),
            messages=tuple(self.messages),
            environment_reward=sum(self.rewards) if self.rewards else None,
        )

    def next_request(self, length: int) -> GenerationRequest | None:
        """The request of the next turn; None if `length` leaves no token for it."""
        ids = (*self.prompt_ids, *self.token_ids)
        if len(ids) >= length:
            return None
        params = replace(self.request.params, max_new_tokens=length - len(ids))
        return replace(self.request, prompt=ids, params=params)

    def add_turn(self, turn: Rollout, text: str) -> None:
        self.turns.append(text)
        self.messages.append({"role": "assistant", "content": text})
        self.token_ids += turn.token_ids
        self.trained_on += [True] * len(turn.token_ids)
        self.log_probs += turn.log_probs

    def add_reply(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        self.messages += messages
        self.token_ids += ids
        self.trained_on += [False] * len(ids)


@dataclass
class ConversationRunner:
    """Holds conversations of up to `max_turns` turns and `length` tokens, of which
    `max_concurrency` are open at a time. They begin with `system_prompt`, unless it is empty or
    they have a system message of their own."""

    tokens: TurnTokens
    length: int
    max_turns: int
    max_concurrency: int
    system_prompt: str = ""

    def run(
        self, sampler: TurnSampler, conversations: Sequence[Conversation]
    ) -> list[ConversationRollout]:
        """The rollout of each conversation, in order. Raises UserError if an environment fails."""
        waiting = deque(conversations)
        running: dict[int, Conversation] = {}
        finished: dict[int, ConversationRollout] = {}
        while waiting or running:
            opened = [waiting.popleft() for _ in range(min(self.free_slots(running), len(waiting)))]
            self.open(opened)
            for each in opened:
                request = each.next_request(self.length)
                assert request is not None, "prompts leave a token"
                running[each.index] = each
                sampler.add(each.index, request)
            ended = sorted(sampler.step().items())
            for index, outcome in self.advance([(running[i], turn) for i, turn in ended]):
                if isinstance(outcome, GenerationRequest):
                    sampler.add(index, outcome)
                else:
                    finished[index] = running.pop(index).rollout(outcome)
        return [finished[each.index] for each in conversations]

    def free_slots(self, running: Mapping[int, Conversation]) -> int:
        return self.max_concurrency - len(running)

    def open(self, conversations: Sequence[Conversation]) -> None:
        """Begin conversations with the messages of their environments."""
        starts = run_environments(
            conversations, lambda each: check_start(each.environment.reset(dict(each.row)))
        )
        for conversation, messages in zip(conversations, starts, strict=True):
            conversation.messages = self.with_system_prompt(messages)
            if not conversation.prompt_ids:
                conversation.variables = template_variables(dict(conversation.row))
                ids = self.tokens.prompt(conversation.messages, conversation.variables)
                conversation.prompt_ids = tuple(ids)
                self.begin_turn(conversation, ids)
            if len(conversation.prompt_ids) >= self.length:
                raise UserError(
                    f"the conversation of row {conversation.index} begins with "
                    f"{len(conversation.prompt_ids)} tokens, with its tools and system_prompt, and "
                    f"max_target_length={self.length} leaves none for the model: raise it"
                )

    def begin_turn(self, conversation: Conversation, ids: Sequence[int]) -> None:
        """`ids`: the tokens before a turn, which tell whether it begins in the model's reasoning;
        a call in it is none."""
        if isinstance(conversation.environment, ToolEnvironment):
            conversation.environment.begin_turn(self.tokens.text(ids))

    def with_system_prompt(self, messages: Sequence[Message]) -> list[Message]:
        if not self.system_prompt or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def advance(
        self, ended: Sequence[tuple[Conversation, Rollout]]
    ) -> list[tuple[int, GenerationRequest | str]]:
        """The next request of each conversation whose turn has ended, or why it is finished."""
        for conversation, turn in ended:
            conversation.add_turn(turn, self.tokens.text(turn.token_ids))
        answered = [(each, turn) for each, turn in ended if turn.finish_reason != "length"]
        steps = run_environments(
            [each for each, _ in answered],
            lambda each: check_step(each.environment.step(each.turns[-1])),
        )
        outcomes: list[tuple[int, GenerationRequest | str]] = [
            (each.index, "length") for each, turn in ended if turn.finish_reason == "length"
        ]
        for (conversation, turn), step in zip(answered, steps, strict=True):
            outcomes.append((conversation.index, self.answer(conversation, turn, step)))
        return sorted(outcomes, key=lambda item: item[0])

    def answer(
        self, conversation: Conversation, turn: Rollout, step: Step
    ) -> GenerationRequest | str:
        messages, reward, done = step
        if reward is not None:
            conversation.rewards.append(reward)
        if done:
            return "end"
        if len(conversation.turns) >= self.max_turns:
            return TOO_MANY_TURNS
        reply = self.tokens.reply(
            messages,
            conversation.variables,
            with_end=turn.finish_reason == "stop",
            last_token=turn.token_ids[-1] if turn.token_ids else None,
        )
        used = len(conversation.prompt_ids) + len(conversation.token_ids)
        if used + len(reply) >= self.length:
            return "length"
        conversation.add_reply(messages, reply)
        self.begin_turn(conversation, reply)
        request = conversation.next_request(self.length)
        assert request is not None, "the reply leaves a token"
        return request


def run_environments(
    conversations: Sequence[Conversation], function: Callable[[Conversation], Result]
) -> list[Result]:
    """The results of a function of the environment of each conversation. Raises UserError for the
    first that fails."""

    def guarded(conversation: Conversation) -> Result | BaseException:
        try:
            return function(conversation)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            return error

    results: list[Result] = []
    outcomes = run_in_threads([partial(guarded, each) for each in conversations])
    for conversation, outcome in zip(conversations, outcomes, strict=True):
        if isinstance(outcome, UserError):
            raise outcome
        failure = (
            f"the environment {type(conversation.environment).__name__} failed for row "
            f"{conversation.index}"
        )
        if isinstance(outcome, InvalidResult):
            raise UserError(f"{failure}: {outcome}")
        if isinstance(outcome, BaseException):
            raise run_failure(failure, outcome) from outcome
        assert outcome is not None, "there is no timeout"
        results.append(outcome)
    return results
