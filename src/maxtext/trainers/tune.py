"""Fine-tuning from Python, with the same code as the commands.

run = tune.sft("~/models/Qwen3-0.6B", rows, lora_rank=16, steps=100)
run.metrics[-1]["loss"]
run.model.generate("Hello")
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maxtext.checkpoint.open import Checkpoint, open_checkpoint
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path
from maxtext.common.hub import find_folder
from maxtext.common.types import Json
from maxtext.configs import fields
from maxtext.configs.derive import run_folder
from maxtext.configs.provenance import Layer
from maxtext.configs.sources import HERE, from_python
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.llm import LLM
from maxtext.input_pipeline import encode_rows
from maxtext.models.configuration import load
from maxtext.tokenizers import Tokenizer
from maxtext.tokenizers.load import open_tokenizer
from maxtext.trainers.checkpointing.export import trained_llm
from maxtext.trainers.configuration import load_run
from maxtext.trainers.loop import Hook, Loop
from maxtext.trainers.methods.method import UserCode
from maxtext.trainers.methods.rl.agents.agent import Agent
from maxtext.trainers.methods.rl.agents.environment import EnvironmentFactory
from maxtext.trainers.methods.rl.rewards.functions import RewardFunction, reward_functions
from maxtext.trainers.train import Result, train

# Rows, or the path of a file of rows; None: the keys name the data
TrainingData = str | os.PathLike | Iterable[Mapping[str, object]] | None
PARQUET, JSONL = ".parquet", (".jsonl", ".json")


@dataclass(frozen=True)
class TuningRun:
    """A finished run. `metrics` has a dict for each step that this process ran, with the keys
    "step", "loss", "tokens", "seconds" and the other metrics of the method.
    """

    metrics: list[Json]
    folder: Path | None  # None: the run left nothing on disk
    result: Result
    checkpoint: Checkpoint | None

    @cached_property
    def model(self) -> LLM:
        """The trained model, or the base with the trained adapter."""
        return trained_llm(self.result.context, self.result.state, self.checkpoint)


def sft(model: str | os.PathLike, data: TrainingData = None, **keys: Any) -> TuningRun:
    """Supervised fine-tuning on rows of conversations, prompts with completions, or texts.

    `model` is a folder or a name, as in `LLM.load`. `data` is an iterable of rows (dicts), the path
    of a JSONL or Parquet file, or None if the keys name the data. `keys` are configuration keys,
    which override the preset sft.yml. Without base_output_directory, the run saves no checkpoints
    and leaves nothing on disk.

    Raises ConfigError for invalid keys or data of another format, and UserError for rows that are
    not JSON.
    """
    return fine_tune("sft", model, data, keys)


def dpo(model: str | os.PathLike, data: TrainingData = None, **keys: Any) -> TuningRun:
    """Direct preference optimization (DPO) on pairs of a chosen and a rejected completion. The
    arguments are those of `sft`."""
    return fine_tune("dpo", model, data, keys)


def orpo(model: str | os.PathLike, data: TrainingData = None, **keys: Any) -> TuningRun:
    """Odds-ratio preference optimization (ORPO) on preference pairs, without a reference model. The
    arguments are those of `sft`."""
    return fine_tune("orpo", model, data, keys)


def reward(model: str | os.PathLike, data: TrainingData = None, **keys: Any) -> TuningRun:
    """Train a reward model on preference pairs. The arguments are those of `sft`. With
    base_output_directory, the run writes the model to `reward_model/` in its folder, or with
    lora_rank an adapter to `adapter/`."""
    return fine_tune("reward", model, data, keys)


def distill(
    student: str | os.PathLike, teacher: str | os.PathLike, data: TrainingData = None, **keys: Any
) -> TuningRun:
    """Train a student on the logits of a teacher with the same vocabulary. `student` and `data` are
    as `model` and `data` in `sft`, and `teacher` is a folder or a name of the Hugging Face Hub.
    """
    overrides = {
        "load_parameters_path": str(find_folder(teacher)),
        **keys.get("teacher_overrides", {}),
    }
    return fine_tune("distill", student, data, keys | {"teacher_overrides": overrides})


def grpo(
    model: str | os.PathLike,
    data: TrainingData = None,
    rewards: Sequence[Callable[..., object]] = (),
    tools: Sequence[Callable[..., object]] = (),
    environment: EnvironmentFactory | None = None,
    **keys: Any,
) -> TuningRun:
    """Reinforcement learning on groups of sampled completions (GRPO; GSPO with loss_algo).

    - `rewards`: functions f(prompts, completions, **columns) that return a list with a number for
      each completion, or None for a completion that is not scored. They may be async. Without
      functions, the built-in rewards apply.
    - `tools`: functions that the model may call, with type hints and a docstring.
    - `environment`: instead of tools, a function that returns a new `Environment` for each
      conversation. Its rewards are added to those of the functions.

    The other arguments are as in `sft`. Raises ConfigError if tools and an environment are both
    given.
    """
    agent = Agent.from_python(tools, environment)
    if agent is not None:
        keys = {"use_agentic_rollout": True, **keys}
        if not keys["use_agentic_rollout"]:
            raise ConfigError("tools and an environment need use_agentic_rollout=true")
    return fine_tune("grpo", model, data, keys, reward_functions(rewards), agent)


def encode(row: Mapping[str, object], tokenizer: str | os.PathLike, **keys: Any) -> Json:
    """{"ids", "mask"}: the token ids of a row, and 1 for the tokens that `sft` trains on, else 0.
    `tokenizer` is a value of tokenizer_path, and `keys` are configuration keys.
    """
    config, loaded = tokenizer_config("sft", tokenizer, keys)
    encoded = encode_rows.encode_row(dict(row), config, loaded)
    return {"ids": encoded.ids.tolist(), "mask": encoded.mask.astype(int).tolist()}


def encode_pair(
    row: Mapping[str, object], tokenizer: str | os.PathLike, **keys: Any
) -> dict[str, list[int]]:
    """{"prompt", "chosen", "rejected"}: the token ids of the prompt and of the two completions that
    `dpo`, `orpo` and `reward` compare. The arguments are those of `encode`."""
    config, loaded = tokenizer_config("dpo", tokenizer, keys)
    pair = encode_rows.encode_pair(dict(row), config, loaded)
    return {name: getattr(pair, name).tolist() for name in ("prompt", "chosen", "rejected")}


def tokenizer_config(
    method: str, tokenizer: str | os.PathLike, keys: Mapping[str, object]
) -> tuple[MaxTextConfig, Tokenizer]:
    """A configuration without a model, and the tokenizer at a path."""
    overrides = from_python({"tokenizer_path": str(tokenizer), **keys})
    config = load(HERE / f"{method}.yml", overrides)
    return config, open_tokenizer(str(tokenizer), None, config.hf_access_token)


def fine_tune(
    method: str,
    model: str | os.PathLike,
    data: TrainingData,
    keys: Mapping[str, object],
    rewards: Sequence[RewardFunction] = (),
    agent: Agent | None = None,
) -> TuningRun:
    """Run a method with its preset. Without base_output_directory, leave nothing on disk."""
    overrides, checkpoint = model_overrides(model, keys)
    with tempfile.TemporaryDirectory(prefix="maxtext-") as temporary:
        defaults = {"base_output_directory": temporary, "enable_checkpointing": False}
        is_temporary = "base_output_directory" not in keys
        layer = from_python(data_keys(data, temporary) | (defaults if is_temporary else {}))
        config = load_run(HERE / f"{method}.yml", layer | overrides, checkpoint)
        collect = CollectMetrics()
        result = train(config, checkpoint, hooks=[collect], user_code=UserCode(rewards, agent))
    folder = None if is_temporary else Path(run_folder(config))
    return TuningRun(collect.metrics, folder, result=result, checkpoint=checkpoint)


def model_overrides(
    model: str | os.PathLike, keys: Mapping[str, Any]
) -> tuple[Layer, Checkpoint | None]:
    """(overrides, checkpoint): the keys with the key that names the model, and the model's opened
    folder, or None for a named model."""
    folder = find_folder(model, keys.get("hf_access_token"))
    if folder.is_dir():
        path = str(folder)
        return from_python({"load_parameters_path": path, **keys}), open_checkpoint(path)
    if str(model) in fields.choices("model_name"):
        return from_python({"model_name": str(model), **keys}), None
    raise ConfigError(
        f"{str(model)!r} is neither a folder nor the name of a model; `maxtext models` lists the "
        "names"
    )


def data_keys(data: TrainingData, folder: str) -> Json:
    """The keys that name the training data; rows are written to a file in `folder`."""
    if data is None:
        return {}
    path = local_path(data) if isinstance(data, str | os.PathLike) else write_rows(data, folder)
    if path.suffix not in (PARQUET, *JSONL):
        raise ConfigError(f"{path} is neither JSONL nor Parquet by its name: set the data keys")
    kind = "parquet" if path.suffix == PARQUET else "jsonl"
    return {"dataset_type": "grain", "grain_file_type": kind, "grain_train_files": str(path)}


def write_rows(rows: Iterable[Mapping[str, object]], folder: str) -> Path:
    path = Path(folder) / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for index, row in enumerate(rows):
            try:
                file.write(json.dumps(row) + "\n")
            except TypeError as error:
                raise UserError(f"row {index} of the data is not JSON: {error}") from error
    return path


class CollectMetrics(Hook):
    """The metrics of each step, with its number."""

    def __init__(self) -> None:
        self.metrics: list[Json] = []

    def on_metrics(self, loop: Loop, step: int, metrics: dict[str, float], seconds: float) -> None:
        tokens = metrics["total_weights"]
        self.metrics.append({"step": step, **metrics, "tokens": tokens, "seconds": seconds})
