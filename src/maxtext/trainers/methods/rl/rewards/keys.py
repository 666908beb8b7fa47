"""The configuration keys that rewards read."""

from typing import Any

from pydantic import ValidationError

from maxtext.common.errors import ConfigError
from maxtext.configs.types import Settings
from maxtext.configs.types.rl import Reward, SpecialTokens


class RewardKeys(Reward, SpecialTokens):
    """Points, penalties, and the texts that delimit reasoning and answer."""

    reasoning_start_token_in_prompt: bool = False

    @classmethod
    def from_python(cls, **keys: Any) -> "RewardKeys":
        """Raises ConfigError for an unknown key or an invalid value."""
        try:
            return cls(**keys)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            ]
            raise ConfigError(*problems) from error

    @classmethod
    def from_config(cls, config: Settings) -> "RewardKeys":
        return cls(**{name: getattr(config, name) for name in cls.model_fields})
