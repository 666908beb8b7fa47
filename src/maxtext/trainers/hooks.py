"""Hooks of the loop: metric records, evaluation, profiles."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax

from maxtext.common import hardware
from maxtext.common.errors import UserError
from maxtext.common.processes import freeze_objects
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.jsonl import read_history
from maxtext.diagnostics.metrics import Record as MetricsRecord
from maxtext.diagnostics.metrics import Recorder
from maxtext.diagnostics.profiler import Profiler
from maxtext.input_pipeline import DataStreams
from maxtext.trainers.compilation.compile import compile_eval_step
from maxtext.trainers.data_loader import AddFields, EvalDataLoader
from maxtext.trainers.loop import Hook, Loop
from maxtext.trainers.objective import Objective
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState, max_nonfinite_steps

WINDOW_SECONDS = 1.0
WINDOW_STEPS = 50


class TrainingFailed(UserError):
    """The loss or gradient norm is not finite. `state` is that of the last finite step."""

    state: Tree = None


def points_of(history: Sequence[MetricsRecord], name: str) -> list[tuple[int, float]]:
    """(step, value) of each record that has the metric."""
    return [
        (int(record["step"] or 0), value)
        for record in history
        if (value := record.get(name)) is not None
    ]


class Throughput:
    """Tokens per second over the newest steps that together took WINDOW_SECONDS, at most
    WINDOW_STEPS: a single short step is noise. The first step of a run, which warms everything up,
    is left out of later windows."""

    def __init__(self) -> None:
        self.steps: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)  # (tokens, seconds)
        self.first = True

    def add(self, tokens: float, seconds: float) -> float:
        if self.first:
            self.first = False
            return tokens / seconds
        self.steps.append((tokens, seconds))
        while sum(duration for _, duration in self.steps) - self.steps[0][1] >= WINDOW_SECONDS:
            self.steps.popleft()
        return sum(count for count, _ in self.steps) / sum(duration for _, duration in self.steps)


class Record(Hook):
    """Writes a record of each step's metrics, and ends a run whose loss is not finite."""

    def __init__(
        self,
        config: MaxTextConfig,
        recorder: Recorder,
        flops_per_token: float,
        peak_flops: float | None,
        profiler: Profiler,
        history: Sequence[MetricsRecord] = (),
    ):
        """`history`: the records of the steps before a resume."""
        self.config = config
        self.recorder = recorder
        self.profiler = profiler
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.losses = points_of(history, "loss")
        self.rewards = points_of(history, "reward")  # of reinforcement learning
        self.earlier_eval_losses = points_of(history, "eval_loss")
        self.throughput = Throughput()
        self.nonfinite_steps = 0  # consecutive, as in TrainState
        self.last = next((dict(last) for last in reversed(history) if "loss" in last), {})

    def on_metrics(self, loop: Loop, step: int, metrics: dict[str, float], seconds: float) -> None:
        timing = self.timing(metrics.get("computed_tokens", metrics["total_weights"]), seconds)
        self.last = {"step": step, **metrics, **timing}
        self.losses.append((step, metrics["loss"]))
        if "reward" in metrics:
            self.rewards.append((step, metrics["reward"]))
        self.recorder.write(self.profiler.visible(self.last))
        self.check(step, metrics["loss"], metrics["raw_grad_norm"])

    def timing(self, tokens: float, seconds: float) -> dict[str, float | None]:
        """The time of a step, and the throughput over a window of steps, of tokens without
        padding, also those of prompts."""
        rate = self.throughput.add(tokens, seconds) / jax.device_count()
        flops = rate * self.flops_per_token
        return {
            "step_time_seconds": seconds,
            "tokens_per_second_per_device": rate,
            "tflops_per_second_per_device": flops / 1e12,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
        }

    def check(self, step: int, loss: float, norm: float) -> None:
        """Raise TrainingFailed if a step ends the run: see `skip_update_if_nonfinite`."""
        value = loss if not math.isfinite(loss) else norm
        is_failure = (math.isnan(value) and self.config.abort_on_nan_loss) or (
            math.isinf(value) and self.config.abort_on_inf_loss
        )
        self.nonfinite_steps = self.nonfinite_steps + 1 if is_failure else 0
        if self.nonfinite_steps >= max_nonfinite_steps(self.config):
            quantity = "loss" if not math.isfinite(loss) else "gradient norm"
            outcome = "training stops with the weights of the step before"
            if self.config.skip_step_on_spikes:
                outcome = (
                    f"training stops after {self.nonfinite_steps} steps in a row that were not "
                    "finite and skipped"
                )
            raise TrainingFailed(
                f"the {quantity} of step {step} is {value}: {outcome}; lower learning_rate, check "
                "the data, or set abort_on_nan_loss=false and abort_on_inf_loss=false"
            )


def is_evaluation_due(config: MaxTextConfig, step: int) -> bool:
    """Whether eval_interval and eval_start_step ask for an evaluation after `step` steps."""
    since_start = step - config.eval_start_step
    return config.eval_interval > 0 and since_start >= 0 and since_start % config.eval_interval == 0


class EvaluateLoss(Hook):
    """Every eval_interval steps from eval_start_step on: the mean loss over eval_steps batches (-1:
    all) of the evaluation data."""

    def __init__(
        self,
        config: MaxTextConfig,
        recorder: Recorder,
        data_loader: Callable[[], Iterator[Tree]],
        eval_step: Callable[[Tree, Tree, Tree], dict[str, jax.Array]],
        objective: Objective,
    ):
        self.config = config
        self.objective = objective
        self.recorder = recorder
        self.data_loader = data_loader
        self.eval_step = eval_step
        self.points: list[tuple[int, float]] = []

    def after_step(self, loop: Loop) -> None:
        if not is_evaluation_due(self.config, loop.step):
            return
        loop.wait()
        metrics = self.objective.eval_metrics(self.sum_batches(loop.state))
        step, loss = loop.step - 1, metrics["loss"]
        self.points.append((step, loss))
        self.recorder.write(
            {"step": step} | {f"eval_{name}": value for name, value in metrics.items()}
        )
        if self.config.target_eval_loss and loss <= self.config.target_eval_loss:
            loop.stop_reason = (
                f"eval_loss {loss:.4f} reached target_eval_loss {self.config.target_eval_loss}"
            )
        loop.restart_clock()

    def sum_batches(self, state: TrainState) -> dict[str, float]:
        """The sums of eval_step over the batches."""
        total: dict[str, jax.Array | float] = {"loss": 0.0, "count": 0.0}
        for count, batch in enumerate(self.data_loader()):
            if count == self.config.eval_steps:
                break
            sums = self.eval_step(state.weights, state.reference, batch)
            total = {name: total.get(name, 0.0) + value for name, value in sums.items()}
        return {name: float(value) for name, value in total.items()}


class FreezeObjects(Hook):
    """Leaves what a process has loaded and compiled after its first step out of garbage
    collections, each of which would stop the host for a fraction of a second."""

    def __init__(self) -> None:
        self.is_frozen = False

    def after_step(self, loop: Loop) -> None:
        if not self.is_frozen:
            freeze_objects()
            self.is_frozen = True


class Profile(Hook):
    def __init__(self, profiler: Profiler):
        self.profiler = profiler

    def before_step(self, loop: Loop) -> None:
        self.profiler.before_step(loop.step, lambda: self.block(loop))

    def after_step(self, loop: Loop) -> None:
        self.profiler.after_step(loop.step - 1, lambda: self.block(loop))

    def block(self, loop: Loop) -> None:
        jax.block_until_ready(loop.state)

    def at_end(self, loop: Loop) -> None:
        self.profiler.close()


def standard_hooks(context: RunContext, recorder: Recorder, first_step: int) -> list[Hook]:
    """Profiles, and records of metrics."""
    config = context.config
    peak_flops = hardware.peak_flops(jax.devices()[0].device_kind, config.dtype.value)
    profiler = Profiler(config, first_step=first_step, last_step=config.steps - 1)
    record = Record(
        config,
        recorder,
        flops_per_token=context.flops_per_token,
        peak_flops=peak_flops,
        profiler=profiler,
        history=read_history(config, first_step) if jax.process_index() == 0 else [],
    )
    return [Profile(profiler), record]


def evaluation_hook(
    context: RunContext, recorder: Recorder, streams: DataStreams, add_fields: AddFields
) -> EvaluateLoss:
    context = context.for_evaluation()
    return EvaluateLoss(
        context.config,
        recorder,
        data_loader=EvalDataLoader(context, streams, add_fields),
        eval_step=compile_eval_step(context, context.config.global_batch_size_to_eval_on),
        objective=context.objective,
    )
