"""The hook that evaluates a policy by sampling: before the first step, every eval_interval steps
from eval_start_step on, and after the last step."""

from collections.abc import Sequence
from pathlib import Path

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.diagnostics.metrics import Recorder
from maxtext.inference.requests import GenerationRequest
from maxtext.trainers.data_loader import eval_data_hint
from maxtext.trainers.hooks import is_evaluation_due
from maxtext.trainers.loop import Hook, Loop
from maxtext.trainers.methods.rl.agents.agent import conversation_columns
from maxtext.trainers.methods.rl.group_sampler import Prompt
from maxtext.trainers.methods.rl.response_evaluation import (
    Responses,
    evaluate_responses,
    problems_per_batch,
    read_problems,
    write_responses,
)
from maxtext.trainers.methods.rl.rollout_step import GroupRolloutStep


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
        engine, sampler = self.step.engine, self.step.sampler
        count = problems_per_batch(self.config, len(self.problems)) * self.config.num_eval_passes

        def sample(problems: Sequence[Prompt], requests: Sequence[GenerationRequest]) -> Responses:
            rollouts = sampler.complete([problem.columns for problem in problems], requests)
            texts = [rollout.text(sampler.tokenizer) for rollout in rollouts]
            return Responses(texts, conversation_columns(rollouts))

        engine.sync(self.step.context.model_weights(loop.state), count)
        try:
            evaluation = evaluate_responses(
                self.config,
                self.problems,
                sample,
                sampler.rewards,
                stop_token_ids=sampler.stop_token_ids,
            )
        finally:
            engine.release()
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
