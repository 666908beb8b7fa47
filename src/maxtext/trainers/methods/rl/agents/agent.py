"""Agentic rollouts of a run: the environment of its conversations, and how they are sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.requests import GenerationRequest
from maxtext.input_pipeline.prompt_templates import delimiter_texts
from maxtext.input_pipeline.user_code import run_failure
from maxtext.tokenizers import ChatTemplate, Tokenizer, chat_template
from maxtext.trainers.methods.rl.agents.conversations import (
    Conversation,
    ConversationRollout,
    ConversationRunner,
    TurnSampler,
)
from maxtext.trainers.methods.rl.agents.environment import (
    Environment,
    EnvironmentFactory,
    Row,
    SingleTurn,
)
from maxtext.trainers.methods.rl.agents.tools import CallFormat, ToolEnvironment, Tools
from maxtext.trainers.methods.rl.agents.turn_tokens import TurnTokens
from maxtext.trainers.methods.rl.rewards.functions import RewardFunction, check_functions
from maxtext.trainers.methods.rl.rollout import Rollout

REWARD_COLUMN, MESSAGES_COLUMN = "environment_reward", "messages"


@dataclass(frozen=True)
class Agent:
    """The tools that the model of a run may call, or the environment that each conversation
    creates."""

    tools: Tools | None = None
    environment: EnvironmentFactory | None = None

    @classmethod
    def from_python(
        cls, tools: Sequence[Callable[..., object]], environment: EnvironmentFactory | None
    ) -> "Agent | None":
        """Returns None if neither is given. Raises ConfigError if tools are not functions, if the
        environment cannot be called, or if both are given.
        """
        check_functions("tools", tools)
        if tools and environment is not None:
            raise ConfigError("tools and an environment exclude each other: call tools in its step")
        if not tools and environment is None:
            return None
        if environment is not None and not callable(environment):
            raise ConfigError(
                "environment must be a class, or a function that returns a new environment, not an "
                f"object of type {type(environment).__name__}"
            )
        return cls(Tools(tools) if tools else None, environment)

    @property
    def rewards(self) -> list[RewardFunction]:
        """A reward function that returns the sum of the environment's rewards."""
        if self.environment is None:
            return []

        def environment(prompts: object, completions: object, **columns: object) -> object:
            return columns[REWARD_COLUMN]

        return [RewardFunction("environment", environment)]


class AgenticSampler:
    """Samples the conversations of rows. Raises ConfigError if the run has no chat template and
    needs one."""

    def __init__(self, config: MaxTextConfig, tokenizer: Tokenizer, agent: Agent | None):
        self.config = config
        self.agent = agent or Agent()
        # Without an environment, tokens are those of the input pipeline.
        self.renders_prompts = agent is not None or bool(config.system_prompt)
        tools = self.agent.tools
        template = chat_template(config, tokenizer, may_be_prompt=True)
        if template is None:
            if self.renders_prompts:
                raise ConfigError(
                    f"conversations need a chat template, and the tokenizer {tokenizer.name} has "
                    "none: set chat_template_path"
                )
            template = ChatTemplate("", tokenizer.name)
        source = "".join(template.sources)
        self.call_format = CallFormat.from_template(source) if tools else CallFormat()
        self.runner = ConversationRunner(
            TurnTokens(
                template,
                tokenizer,
                schemas=tools.schemas if tools else (),
                tags=self.call_format.tags,
                common_variables=delimiter_texts(config),
            ),
            length=config.max_target_length,
            max_turns=config.max_turns,
            max_concurrency=config.max_concurrency,
            system_prompt=config.system_prompt,
        )

    def run(
        self,
        sampler: TurnSampler,
        rows: Sequence[Row],
        requests: Sequence[GenerationRequest],
    ) -> list[ConversationRollout]:
        """The conversation of each row. `requests`: those of a first turn without environment."""
        return self.runner.run(sampler, self.conversations(rows, requests))

    def prompt_ids(
        self, rows: Sequence[Row], requests: Sequence[GenerationRequest]
    ) -> list[tuple[int, ...]]:
        """The tokens that the conversation of each row begins with."""
        conversations = self.conversations(rows, requests)
        self.runner.open(conversations)
        return [conversation.prompt_ids for conversation in conversations]

    def conversations(
        self, rows: Sequence[Row], requests: Sequence[GenerationRequest]
    ) -> list[Conversation]:
        return [
            Conversation(
                index,
                row,
                environment=self.environment(),
                request=request,
                prompt_ids=() if self.renders_prompts else tuple(map(int, request.prompt)),
            )
            for index, (row, request) in enumerate(zip(rows, requests, strict=True))
        ]

    def environment(self) -> Environment:
        if self.agent.environment is not None:
            return create_environment(self.agent.environment)
        if self.agent.tools is not None:
            return ToolEnvironment(self.agent.tools, self.call_format)
        return SingleTurn()


def create_environment(factory: EnvironmentFactory) -> Environment:
    """Raises UserError if the user's code fails."""
    try:
        return factory()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        name = getattr(factory, "__name__", type(factory).__name__)
        raise run_failure(f"the environment {name} cannot be created", error) from error


def conversation_columns(rollouts: Sequence[Rollout]) -> dict[str, list[object]]:
    """Columns for reward functions: the messages of conversations, and the rewards of their
    environments."""
    conversations = [each for each in rollouts if isinstance(each, ConversationRollout)]
    if not conversations:
        return {}
    return {
        MESSAGES_COLUMN: [list(each.messages) for each in conversations],
        REWARD_COLUMN: [each.environment_reward for each in conversations],
    }


def conversation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean number of turns, and the share of conversations that max_turns ended."""
    conversations = [each for each in rollouts if isinstance(each, ConversationRollout)]
    if not conversations:
        return {}
    return {
        "conversations/mean_turns": float(np.mean([len(each.turns) for each in conversations])),
        "conversations/max_turns": float(
            np.mean([each.finish_reason == "turns" for each in conversations])
        ),
    }
