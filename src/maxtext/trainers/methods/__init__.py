"""The training methods. A new one is a module or a folder here, and a row of METHODS."""

from maxtext.configs.types import MaxTextConfig
from maxtext.trainers.methods.distillation.method import DISTILLATION, GKD, OFFLINE
from maxtext.trainers.methods.language_modeling import PRETRAINING, SFT
from maxtext.trainers.methods.method import Method
from maxtext.trainers.methods.preference.method import PREFERENCE
from maxtext.trainers.methods.reward.method import REWARD
from maxtext.trainers.methods.rl.method import GRPO

# The first that a configuration asks for
METHODS = (GRPO, PREFERENCE, REWARD, GKD, DISTILLATION, OFFLINE, SFT, PRETRAINING)


def method_of(config: MaxTextConfig) -> Method:
    return next(method for method in METHODS if method.is_chosen(config))
