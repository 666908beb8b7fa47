"""Training, by any method: from a configuration to a trained state, with metrics, checkpoints and
a summary. The record of the run's method (methods/) says what is read and minimized."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from maxtext.checkpoint.manager import check_writable
from maxtext.checkpoint.multihost import SaveFailed
from maxtext.checkpoint.open import Checkpoint
from maxtext.common import hardware, progress
from maxtext.common.errors import UserError, out_of_memory
from maxtext.common.files import write_text
from maxtext.common.log import LOGGER
from maxtext.common.run_lock import RunLock
from maxtext.common.signals import call_on_signals
from maxtext.configs import serialize
from maxtext.configs.derive import run_folder
from maxtext.configs.startup import configure_process
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.console import start_banner
from maxtext.diagnostics.jsonl import read_history
from maxtext.diagnostics.metrics import Recorder, make_writers
from maxtext.diagnostics.profiler import Profiler
from maxtext.diagnostics.stack_trace import stack_traces
from maxtext.input_pipeline.data_streams import DataStreams
from maxtext.trainers.banner import banner
from maxtext.trainers.batch_size import batch_size_at
from maxtext.trainers.checkpointing.export import save_results
from maxtext.trainers.checkpointing.init_state import with_reference
from maxtext.trainers.checkpointing.restore import Start, find_start, frozen_checksum
from maxtext.trainers.checkpointing.save import Save
from maxtext.trainers.compilation.compile import compile_eval_step
from maxtext.trainers.compilation.step_cache import StepCache
from maxtext.trainers.data_loader import (
    AddFields,
    EvalDataLoader,
    TrainDataLoader,
    open_eval_streams,
)
from maxtext.trainers.epochs import has_open_end, with_steps_of_epochs
from maxtext.trainers.hooks import EvaluateLoss, Profile, Record, TrainingFailed
from maxtext.trainers.loop import Hook, Loop
from maxtext.trainers.memory.usage import FreeMemory, check_state, compile_and_check
from maxtext.trainers.methods import method_of
from maxtext.trainers.methods.method import StepSetup
from maxtext.trainers.methods.rl.rewards.functions import RewardFunction
from maxtext.trainers.outcome import stop_signal, summarize
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState

if TYPE_CHECKING:
    from maxtext.trainers.methods.rl.agents.agent import Agent


@dataclass
class Result:
    context: RunContext
    state: TrainState
    summary: dict[str, Any]
    signal: int | None = None  # that ended the run before its steps were done


def train(
    config: MaxTextConfig,
    checkpoint: Checkpoint | None = None,
    hooks: Sequence[Hook] = (),
    rewards: Sequence[RewardFunction] = (),
    agent: "Agent | None" = None,
) -> Result:
    """`checkpoint`: load_parameters_path, if it is open already. `hooks`: further ones. `rewards`:
    those of reinforcement learning, in place of the built-in ones. `agent`: what the model may use
    in its conversations."""
    configure_process(config)
    folder = Path(run_folder(config))
    check_writable(folder, "base_output_directory")
    with RunLock(folder) if jax.process_index() == 0 else contextlib.nullcontext():
        try:
            return train_locked(config, checkpoint, hooks, rewards, agent)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            shortage = out_of_memory(error, method_of(config).batches.microbatch_key)
            if shortage is None:
                raise
            raise shortage from error


def train_locked(
    config: MaxTextConfig,
    checkpoint: Checkpoint | None,
    more_hooks: Sequence[Hook],
    rewards: Sequence[RewardFunction],
    agent: "Agent | None",
) -> Result:
    """Train while this process holds the lock of the run's folder."""
    start_time = time.perf_counter()
    context = RunContext.from_config(config)
    context.shardings.check()
    check_state(context, free := FreeMemory.measure())
    if has_open_end(context):
        context = with_steps_of_epochs(context)
        config = context.config
    method = context.method
    data_loader = method.data_loader(context)
    eval_streams = open_eval_streams(context.for_evaluation())
    start = find_start(context, data_loader.source, checkpoint)
    if start.step >= config.steps:
        data_loader.close()
        return nothing_to_do(context, start)
    step_cache = StepCache(context)
    first_step = compile_and_check(
        context, free, lambda: compile_first_step(step_cache, data_loader, start.step)
    )
    with progress.working("preparing the weights"):
        state, key = start.result()
        state = with_reference(context, state, start.step, checkpoint)
    checksum = frozen_checksum(context, state, start)
    data_loader.add_fields = method.prepare_batches(context, state, start.step, checkpoint)
    if jax.process_index() == 0:
        start_banner(banner(context, first_step, run_folder(config), start.origin))
    writers = make_writers(
        config,
        is_writer=jax.process_index() == 0,
        first_step=start.step,
        devices=jax.device_count(),
        shows_flops=jax.default_backend() != "cpu",
    )
    write_configuration(config)
    # A signal after the last step must not interrupt the last save or the summary.
    with contextlib.ExitStack() as signal_handlers:
        with Recorder(writers) as recorder, stack_traces(config), contextlib.ExitStack() as closing:
            hooks = build_hooks(context, recorder, start.step)
            if eval_streams is not None:
                hooks.append(loss_hook(context, recorder, eval_streams, data_loader.add_fields))
            setup = StepSetup(
                context, step_cache, data_loader, start.step, checkpoint, rewards, agent
            )
            train_step = method.wrap_step(setup)
            hooks += [*method.hooks(train_step, recorder), *more_hooks]
            save = None
            if config.enable_checkpointing:
                save = Save(context, data_loader.source, start, checksum)
                hooks.append(save)
                closing.callback(save.close)
            loop = Loop(
                state,
                train_step,
                data_loader=data_loader,
                key=key,
                steps=config.steps,
                hooks=hooks,
                first_step=start.step,
                max_inflight=config.max_inflight_computations,
            )
            LOGGER.info("set up in %.1f s", time.perf_counter() - start_time)
            signal_handlers.enter_context(call_on_signals(loop.on_signal))
            try:
                failure = run_and_save(loop, save)
            finally:
                data_loader.close()
        if failure is None and stop_signal(loop) is None:
            save_results(context, loop.state, run_folder(config), checkpoint)
        seconds = time.perf_counter() - start_time
        summary = summarize(context, loop, hooks, run_folder(config), seconds, failure)
    if failure is not None:
        raise failure
    return Result(context, loop.state, summary=summary, signal=stop_signal(loop))


def compile_first_step(step_cache: StepCache, data_loader: TrainDataLoader, step: int) -> Any:
    rows = batch_size_at(step_cache.context.config, step)
    LOGGER.info("compiling the train step")
    with progress.working("compiling the train step"):
        return step_cache.get(rows, shared_prefix=data_loader.first_shared_prefix())


def run_and_save(loop: Loop, save: Save | None) -> UserError | None:
    """Run the loop and save its last state. Returns the reason why the run failed, if it did."""
    failure: UserError | None = None
    try:
        loop.run()
    except TrainingFailed as error:
        error.state = loop.state
        failure = error
    if save is not None:
        try:
            save.finish(loop)
        except SaveFailed as error:
            failure = failure or error
    return failure


def build_hooks(
    context: RunContext,
    recorder: Recorder,
    first_step: int,
) -> list[Hook]:
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


def loss_hook(
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


def nothing_to_do(context: RunContext, start: Start) -> Result:
    """The result of a run that had all its steps already. Nothing is written."""
    config = context.config
    LOGGER.info(
        "nothing to do: %s is at steps=%d already; raise steps to go on",
        start.origin,
        config.steps,
    )
    path = Path(run_folder(config)) / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return Result(context, start.result()[0], summary=summary | {"steps": start.step})


def write_configuration(config: MaxTextConfig) -> None:
    """Write the resolved configuration to the run's folder, as a file to read and to run again."""
    if config.log_config and jax.process_index() == 0:
        write_text(
            os.path.join(run_folder(config), "config.yml"),
            serialize.yaml_text(config, serialize.KEYS_IN_ORDER),
        )
