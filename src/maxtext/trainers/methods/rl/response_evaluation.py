"""Evaluation by sampling: responses to problems, how many of them are correct, and the hook that
evaluates a policy so.

`evaluate_responses` samples and grades. Every problem gets num_eval_passes responses,
eval_batch_size problems at a time. Their seeds depend on data_shuffle_seed, the problem and the
number of the response, so that neither other problems nor the number of slots change a text.

`EvaluateResponses` is the hook: it evaluates before the first step, every eval_interval steps from
eval_start_step on, and after the last step.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import atomic_writer
from maxtext.common.log import LOGGER
from maxtext.configs.eval_sampling import evaluation_sampling
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.metrics import Recorder
from maxtext.inference.llm import LLM
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.input_pipeline.interface import Split
from maxtext.input_pipeline.loader import open_data_streams
from maxtext.input_pipeline.row_formats import PROMPTS
from maxtext.tokenizers import Tokenizer, load_tokenizer
from maxtext.trainers.data_loader import eval_data_hint
from maxtext.trainers.hooks import is_evaluation_due
from maxtext.trainers.loop import Hook, Loop
from maxtext.trainers.methods.rl.agents.agent import AgenticSampler, conversation_columns
from maxtext.trainers.methods.rl.group_sampler import Prompt, mean, read_prompts
from maxtext.trainers.methods.rl.rewards.answers import RewardKeys, accepted_answers
from maxtext.trainers.methods.rl.rewards.functions import (
    RewardFunction,
    answer_column,
    compute_rewards,
    total_rewards,
)
from maxtext.trainers.methods.rl.rewards.grading import combine_grades, grade_problems, pass_at_k
from maxtext.trainers.methods.rl.rollout import sample_seed
from maxtext.trainers.methods.rl.rollout_step import GroupRolloutStep

FILE = "evaluation.jsonl"


@dataclass(frozen=True)
class Responses:
    """`columns`: what sampling adds to those of the problems, for reward functions."""

    texts: list[str]
    columns: dict[str, list[object]] = field(default_factory=dict)


# The responses to requests, in order; with the problem of each request
SampleResponses = Callable[[Sequence[Prompt], Sequence[GenerationRequest]], Responses]


@dataclass(frozen=True)
class ProblemResult:
    """`right`: the number of correct responses; `accuracy` combines them by eval_mode."""

    question: object
    answers: tuple[str, ...]
    responses: tuple[str, ...]
    right: int
    accuracy: float
    partial_accuracy: float
    format: float

    def to_json(self) -> str:
        """The line of a problem in evaluation.jsonl."""
        names = ("question", "answers", "responses", "right", "accuracy")
        return json.dumps({name: getattr(self, name) for name in names}, ensure_ascii=False)


@dataclass(frozen=True)
class ResponseEvaluation:
    problems: tuple[ProblemResult, ...]
    reward: float  # mean of all responses

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the problems; pass@k for k = 1, 2, 4 … up to the number of responses."""
        metrics = {
            name: float(np.mean([getattr(each, name) for each in self.problems]))
            for name in ("accuracy", "partial_accuracy", "format")
        }
        metrics["reward"] = self.reward
        count, k = len(self.problems[0].responses), 1
        while k <= count:
            values = [pass_at_k(count, each.right, k) for each in self.problems]
            metrics[f"pass_at_{k}"] = float(np.mean(values))
            k *= 2
        return metrics


def evaluate_responses(
    config: MaxTextConfig,
    prompts: Sequence[Prompt],
    sample: SampleResponses,
    rewards: Sequence[RewardFunction],
    stop_token_ids: tuple[int, ...] = (),
) -> ResponseEvaluation:
    """Sample responses to the prompts and grade them. Raises UserError if the rows have no
    reference answers."""
    count = config.num_eval_passes
    columns = {
        name: [prompt.columns.get(name) for prompt in prompts]
        for name in dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    }
    answers = answer_column(columns)
    sampled = sample_responses(config, prompts, sample, stop_token_ids)
    texts = sampled.texts
    groups = [texts[start : start + count] for start in range(0, len(texts), count)]
    keys = RewardKeys.from_config(config)
    results = []
    for prompt, answer, responses, grades in zip(
        prompts, answers, groups, grade_problems(groups, answers, keys), strict=True
    ):
        accuracy, partial_accuracy, form = combine_grades(responses, grades, config.eval_mode, keys)
        result = ProblemResult(
            prompt.columns["prompt"],
            accepted_answers(answer),
            responses=tuple(responses),
            right=sum(accuracy == 1 for accuracy, _, _ in grades),
            accuracy=accuracy,
            partial_accuracy=partial_accuracy,
            format=form,
        )
        results.append(result)
    repeated = {
        name: [value for value in column for _ in range(count)] for name, column in columns.items()
    } | sampled.columns
    values = compute_rewards(rewards, repeated.pop("prompt"), texts, repeated)
    return ResponseEvaluation(tuple(results), reward=mean(total_rewards(rewards, values)))


def sample_responses(
    config: MaxTextConfig,
    prompts: Sequence[Prompt],
    sample: SampleResponses,
    stop_token_ids: tuple[int, ...],
) -> Responses:
    """num_eval_passes responses to each prompt, in order."""
    pairs = [
        (prompt, response_request(config, prompt, index, number, stop_token_ids))
        for index, prompt in enumerate(prompts)
        for number in range(config.num_eval_passes)
    ]
    size = problems_per_batch(config, len(prompts)) * config.num_eval_passes
    batches = [
        sample(*zip(*pairs[start : start + size], strict=True))
        for start in range(0, len(pairs), size)
    ]
    return Responses(
        [text for batch in batches for text in batch.texts],
        {
            name: [value for batch in batches for value in batch.columns[name]]
            for name in batches[0].columns
        },
    )


def problems_per_batch(config: MaxTextConfig, problems: int) -> int:
    """The problems that are sampled at a time."""
    return min(config.eval_batch_size, problems) if config.eval_batch_size > 0 else problems


def evaluate_llm_responses(
    config: MaxTextConfig,
    llm: LLM,
    prompts: Sequence[Prompt],
    rewards: Sequence[RewardFunction],
) -> ResponseEvaluation:
    """`evaluate_responses` with the responses of a loaded model, whose texts are those that reward
    functions get in a run: with the stop string, if one ended it. Raises UserError if one cannot be
    sampled."""
    tokenizer = load_tokenizer(config)
    if config.system_prompt:
        prompts = with_system_prompt(config, tokenizer, prompts)

    def sample(problems: Sequence[Prompt], requests: Sequence[GenerationRequest]) -> Responses:
        texts = [""] * len(requests)
        for completion in llm.completions(
            list(requests),
            spare_tokens=config.kv_cache_buffer,
            memory_fraction=config.hbm_utilization_vllm,
        ):
            if completion.error is not None:
                raise UserError(completion.error)
            texts[completion.index] = tokenizer.decode(completion.token_ids)
        return Responses(texts)

    return evaluate_responses(config, prompts, sample, rewards)


def with_system_prompt(
    config: MaxTextConfig, tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> list[Prompt]:
    """The prompts with the tokens of conversations that begin with system_prompt."""
    rows = [prompt.columns for prompt in prompts]
    requests = [GenerationRequest(prompt.ids) for prompt in prompts]
    token_ids = AgenticSampler(config, tokenizer, None).prompt_ids(rows, requests)
    return [replace(prompt, ids=list(ids)) for prompt, ids in zip(prompts, token_ids, strict=True)]


def response_request(
    config: MaxTextConfig,
    prompt: Prompt,
    index: int,
    number: int,
    stop_token_ids: tuple[int, ...],
) -> GenerationRequest:
    """Response `number` to problem `index`."""
    params = SamplingParams(
        **evaluation_sampling(config.eval_sampling_strategy, config.generation_configs),
        max_new_tokens=config.max_target_length - len(prompt.ids),
        seed=sample_seed(config.data_shuffle_seed, 0, index, number),
        stop=tuple(config.stop_strings or ()),
        stop_token_ids=stop_token_ids,
    )
    return GenerationRequest(prompt.ids, params)


def read_problems(config: MaxTextConfig) -> list[Prompt] | None:
    """The rows of the evaluation data from test_batch_start_index up to num_test_batches batches,
    or the end of the data. None if no key names evaluation data. Raises ConfigError if there is no
    such row."""
    streams = open_data_streams(config, Split.EVAL, PROMPTS, rows=lambda step: 1, sizes=[1])
    if streams is None:
        return None
    first = config.test_batch_start_index
    last = None
    if config.num_test_batches > 0:
        last = config.num_test_batches * config.batch_size

    def prompts() -> Iterator[Prompt]:
        for batch in streams:
            yield from read_prompts(batch)

    problems = list(islice(prompts(), first, last))
    if not problems:
        raise ConfigError(
            f"the evaluation data has no row from test_batch_start_index={first} on: lower it"
        )
    return problems


def require_problems(config: MaxTextConfig) -> list[Prompt]:
    problems = read_problems(config)
    if problems is None:
        raise ConfigError(f"there is nothing to evaluate on: {eval_data_hint(config)}")
    return problems


def write_responses(config: MaxTextConfig, evaluation: ResponseEvaluation, folder: Path) -> Path:
    """Write the problems that are not answered correctly, or with eval_corr_lst those that are."""
    with atomic_writer(folder / FILE, "w") as file:
        for problem in evaluation.problems:
            if (problem.accuracy == 1) == config.eval_corr_lst:
                file.write(problem.to_json() + "\n")
    return folder / FILE


class EvaluateResponses(Hook):
    """Writes the metrics of `ResponseEvaluation` with the prefix eval_, and the responses to the
    folder of the run if eval_make_lst is set."""

    def __init__(self, step: GroupRolloutStep, problems: list[Prompt], recorder: Recorder):
        self.step = step
        self.config = step.config
        self.problems = problems
        self.recorder = recorder
        self.folder = Path(step.folder)
        self.is_first = True

    def before_step(self, loop: Loop) -> None:
        if loop.step == 0 and self.is_first:
            self.evaluate_policy(loop)
        self.is_first = False

    def after_step(self, loop: Loop) -> None:
        if loop.step == loop.steps or is_evaluation_due(self.config, loop.step):
            self.evaluate_policy(loop)

    def evaluate_policy(self, loop: Loop) -> None:
        """The record has the number of the step before, as that of an evaluation loss; the first
        has 0."""
        loop.wait()
        sampler = self.step.group_sampler
        count = problems_per_batch(self.config, len(self.problems)) * self.config.num_eval_passes

        def sample(problems: Sequence[Prompt], requests: Sequence[GenerationRequest]) -> Responses:
            rollouts = sampler.complete([problem.columns for problem in problems], requests)
            texts = [rollout.text(sampler.tokenizer) for rollout in rollouts]
            return Responses(texts, conversation_columns(rollouts))

        with self.step.sampler.synced(self.step.context.model_weights(loop.state), count):
            evaluation = evaluate_responses(
                self.config,
                self.problems,
                sample,
                sampler.rewards,
                stop_token_ids=sampler.stop_token_ids,
            )
        metrics = evaluation.metrics
        LOGGER.info(
            "after %d steps: %s",
            loop.step,
            ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()),
        )
        self.recorder.write(
            {"step": max(loop.step - 1, 0)}
            | {f"eval_{name}": value for name, value in metrics.items()}
        )
        if self.config.eval_make_lst:
            write_responses(self.config, evaluation, self.folder)
        loop.restart_clock()


def response_evaluation_hooks(step: GroupRolloutStep, recorder: Recorder) -> list[Hook]:
    """Empty if the run has no evaluation data. Raises ConfigError if a key asks for evaluation
    and there is no data."""
    config = step.config
    if not config.num_test_batches:
        return []
    problems = read_problems(config)
    if problems is None:
        for key in ("eval_interval", "num_test_batches"):
            if config.source(key).kind not in ("default", "file"):
                raise ConfigError(
                    f"{key}={getattr(config, key)} ({config.source(key)}) needs evaluation data: "
                    f"{eval_data_hint(config)}"
                )
        LOGGER.info("the policy is not evaluated: %s", eval_data_hint(config))
        return []
    return [EvaluateResponses(step, problems, recorder)]
