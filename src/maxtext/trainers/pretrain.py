"""Pre-training: a configuration in, a trained state out, with everything a person wants to see on
the way.
"""

import contextlib
import json
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxtext.checkpoint.manager import check_writable
from maxtext.checkpoint.multihost import SaveFailed
from maxtext.common import hardware, progress, signals
from maxtext.common.errors import MissingExtra, UserError
from maxtext.common.files import write_text
from maxtext.common.log import LOGGER
from maxtext.common.run_lock import RunLock
from maxtext.common.signals import asked_by_signals
from maxtext.configs import text
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.console import start_banner
from maxtext.diagnostics.metrics import Recorder, make_writers
from maxtext.diagnostics.plot import save_loss_png
from maxtext.diagnostics.profiler import Profiler
from maxtext.diagnostics.stack_trace import stack_traces
from maxtext.diagnostics.summary import write_summary
from maxtext.models.counts import parameter_count, train_flops_per_token
from maxtext.models.registry import layers
from maxtext.sharding.topology import local_memory
from maxtext.trainers import restore
from maxtext.trainers.compiled import CompiledSteps
from maxtext.trainers.feed import EvaluationFeed, TrainFeed, eval_streams
from maxtext.trainers.hooks import Evaluate, Profile, Record, TrainingFailed
from maxtext.trainers.loop import ASKED_ELSEWHERE, Hook, Loop
from maxtext.trainers.rows import rows_at
from maxtext.trainers.save import Save
from maxtext.trainers.setup import Setup
from maxtext.trainers.step import TrainState


@dataclass
class Result:
    setup: Setup
    state: TrainState
    summary: dict[str, Any]
    signal: int | None = None  # that ended the run before its steps were done


def train(config: MaxTextConfig) -> Result:
    folder = Path(run_folder(config))
    check_writable(folder, "base_output_directory")
    with RunLock(folder) if jax.process_index() == 0 else contextlib.nullcontext():
        return train_here(config)


def train_here(config: MaxTextConfig) -> Result:
    """In a folder that no other run works in."""
    started = time.perf_counter()
    setup = Setup.of(config)
    setup.check_layout()
    feed = TrainFeed(setup)
    evaluation = eval_streams(setup)
    warned = warn_of_memory(
        state_bytes(setup), "the state of training alone"
    )  # before any of it is made
    start = restore.start(setup, feed.source)
    if start.step >= config.steps:
        feed.close()
        return nothing_to_do(setup, start)
    peak = hardware.peak_flops(jax.devices()[0].device_kind, config.dtype.value)
    profiler = Profiler(config, start.step, config.steps - 1)
    steps = CompiledSteps(setup)
    LOGGER.info("compiling the train step")
    with progress.working("compiling the train step"):
        first_step = steps.for_rows(rows_at(config, start.step))
    if not warned:
        warn_of_memory(step_bytes(first_step), "a step")
    with progress.working("preparing the weights"):
        state, key = start.ready()
    if jax.process_index() == 0:
        start_banner(banner(setup, first_step, start))
    writers = make_writers(
        config,
        is_writer=jax.process_index() == 0,
        first_step=start.step,
        peak_flops=peak,
        peak_format=config.dtype.value,
    )
    write_configuration(config)
    with (
        contextlib.ExitStack() as asked
    ):  # a signal after the last step does not tear its save or the summary
        with Recorder(writers) as recorder, stack_traces(config), contextlib.ExitStack() as closing:
            record = Record(config, recorder, train_flops_per_token(config), peak, profiler)
            hooks: list[Hook] = [Profile(profiler), record]
            if evaluation is not None:
                eval_step = setup.compile_eval_step(config.global_batch_size_to_eval_on)
                hooks.append(
                    Evaluate(config, recorder, EvaluationFeed(setup, evaluation), eval_step)
                )
            save = Save(setup, feed.source, start) if config.enable_checkpointing else None
            if save is not None:
                hooks.append(save)
                closing.callback(save.close)
            loop = Loop(state, steps, feed, key, config.steps, hooks, start.step)
            LOGGER.info("set up in %.1f s", time.perf_counter() - started)
            asked.enter_context(asked_by_signals(loop.on_signal))
            failure: UserError | None = None
            try:
                loop.run()
            except TrainingFailed as error:
                error.state = loop.state
                failure = error
            finally:
                feed.close()
            if save is not None:
                try:
                    save.finish(loop)
                except SaveFailed as error:
                    failure = failure or error
        summary = summarise(config, setup, loop, hooks, time.perf_counter() - started, failure)
    if failure is not None:
        raise failure
    return Result(setup, loop.state, summary, stopped_by(loop))


def stop_reason(loop: Loop) -> str:
    late = loop.step >= loop.steps and loop.stop in (
        *signals.NAMES,
        ASKED_ELSEWHERE,
    )  # it came after the last step
    return "all steps done" if loop.stop is None or late else loop.stop


def stopped_by(loop: Loop) -> int | None:
    """The signal that ended a run with steps left; where another process got it, SIGTERM stands for
    it.
    """
    if loop.step >= loop.steps:
        return None
    if loop.stop in signals.NAMES:
        return loop.signal
    return signal.SIGTERM if loop.stop == ASKED_ELSEWHERE else None


def nothing_to_do(setup: Setup, start: restore.Start) -> Result:
    """The end of a run that had ended before: nothing is written."""
    LOGGER.info(
        "nothing to do: %s is at steps=%d already; raise steps to go on",
        start.origin,
        setup.config.steps,
    )
    path = Path(run_folder(setup.config)) / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return Result(setup, start.ready()[0], summary | {"steps": start.step})


def banner(
    setup: Setup, step: jax.stages.Compiled, start: restore.Start
) -> dict[str, dict[str, str]]:
    """What is about to run, in numbers."""
    config = setup.config
    memory = step.memory_analysis()
    needed = step_bytes(step)
    mesh = {axis: size for axis, size in setup.rules.mesh.shape.items() if size > 1}
    model = {
        "name": f"{config.model_name} ({config.decoder_block.value} blocks)",
        "parameters": f"{parameter_count(setup.template.weights):,}",
        "layers": f"{len(layers(config))}, {'scanned' if config.scan_layers else 'unrolled'}",
        "FLOPs a token": f"{train_flops_per_token(config):.3e} in training (products only, causal, no remat)",
    }
    if memory is not None:
        state, rest = (
            hardware.size(memory.argument_size_in_bytes),
            hardware.size(memory.temp_size_in_bytes),
        )
        model["memory a device"] = (
            f"{hardware.size(needed)} ({state} state and batch, {rest} temporary)"
        )
    tokens = config.global_batch_size_to_train_on * config.max_target_length
    return {
        "Model": model,
        "Mesh": {
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "axes": ", ".join(f"{axis} {length}" for axis, length in mesh.items()) or "one device",
            "numbers": f"{config.dtype.value} on {config.weight_dtype.value} weights",
        },
        "Plan": {
            "run": run_folder(config),
            "steps": f"{config.steps:,}",
            "tokens a step": f"{tokens:,} ({config.global_batch_size_to_train_on} x {config.max_target_length})",
            "optimizer": f"{config.opt_type.value}, {config.lr_schedule_type.value} to {config.learning_rate:g}",
            "data": config.dataset_type.value,
            "start": start.origin,
            "saved": saved(config),
        },
    }


def step_bytes(step: jax.stages.Compiled) -> int:
    """What a step needs on one device; 0 where the compiler does not say."""
    memory = step.memory_analysis()
    if memory is None:
        return 0
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + max(new, 0) + memory.temp_size_in_bytes


def state_bytes(setup: Setup) -> int:
    """Weights and optimizer state on one device."""
    leaves, shardings = (
        jax.tree.leaves(setup.abstract_state),
        jax.tree.leaves(setup.state_shardings),
    )
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, shardings, strict=True)
        if sharding.memory_kind != "pinned_host"
    )


def warn_of_memory(needed: int, what: str) -> bool:
    """Say that `what` does not fit, and what to change; whether it does not."""
    devices = jax.local_devices()
    limit = local_memory(devices[0], len(devices))
    too_large = limit is not None and needed > limit
    if too_large:
        LOGGER.warning(
            "%s needs about %s on each device, which has %s: expect it to fail or to swap; lower "
            "per_device_batch_size, max_target_length or the size of the model (base_emb_dim, "
            "base_num_decoder_layers), set remat_policy=full, or use more devices; `maxtext estimate` with the same "
            "words says what fits",
            what,
            hardware.size(needed),
            hardware.size(limit or 0),
        )
    return too_large


def saved(config: MaxTextConfig) -> str:
    if not config.enable_checkpointing:
        return "metrics and plots, no checkpoints"
    when = (
        "at every chance"
        if config.enable_continuous_checkpointing
        else f"every {config.checkpoint_period:,} steps"
    )
    kept = config.max_num_checkpoints_to_keep
    return f"metrics, plots, and checkpoints {when}" + (f", of which {kept} stay" if kept else "")


def run_folder(config: MaxTextConfig) -> str:
    return os.path.join(config.base_output_directory, config.run_name)


def write_configuration(config: MaxTextConfig) -> None:
    """The whole configuration beside the run's other files, to read and to run again."""
    if config.log_config and jax.process_index() == 0:
        write_text(
            os.path.join(run_folder(config), "config.yml"),
            text.yaml_text(config, text.KEYS_IN_ORDER),
        )


def summarise(
    config: MaxTextConfig,
    setup: Setup,
    loop: Loop,
    hooks: list[Hook],
    seconds: float,
    failure: Exception | None,
) -> dict[str, Any]:
    """loss.png and summary.json in the run's folder."""
    record = next(hook for hook in hooks if isinstance(hook, Record))
    evaluations = [point for hook in hooks if isinstance(hook, Evaluate) for point in hook.points]
    summary = {
        "run_name": config.run_name,
        "steps": loop.step,
        "stopped": str(failure) if failure else stop_reason(loop),
        "parameters": parameter_count(setup.template.weights),
        "seconds": round(seconds, 3),
        # An upper bound of what steps waited for data: while the host did, the device may have had
        # a step to work on.
        "data_wait": round(loop.data_seconds / loop.step_seconds, 5) if loop.step_seconds else None,
        "first_loss": record.losses[0][1] if record.losses else None,
        "final": record.last,
        "eval_loss": evaluations[-1][1] if evaluations else None,
    }
    waited = (
        ""
        if summary["data_wait"] is None
        else f"; waited for data {summary['data_wait']:.2%} of the time"
    )
    goes_on = (
        "; the same command goes on"
        if failure is None and stopped_by(loop) and config.enable_checkpointing
        else ""
    )
    LOGGER.info("stopped after %d steps: %s%s%s", loop.step, summary["stopped"], goes_on, waited)
    if jax.process_index() == 0:
        write_summary(os.path.join(run_folder(config), "summary.json"), summary)
        if record.losses:
            steps, losses = zip(*record.losses, strict=True)
            path = os.path.join(run_folder(config), "loss.png")
            try:
                save_loss_png(path, steps, losses, evaluations, title=config.run_name)
                LOGGER.info("wrote summary.json and loss.png to %s", run_folder(config))
            except MissingExtra as error:
                LOGGER.info("wrote summary.json to %s; %s", run_folder(config), error)
    return summary
