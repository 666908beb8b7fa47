"""Training, by any method: from a configuration to a trained state, with metrics, checkpoints and
a summary. The record of the run's method (methods/) says what is read and minimized."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from maxtext.checkpoint.manager import check_writable
from maxtext.checkpoint.open import Checkpoint
from maxtext.common.errors import out_of_memory
from maxtext.common.log import LOGGER
from maxtext.common.run_lock import RunLock
from maxtext.common.signals import call_on_signals
from maxtext.common.types import Json
from maxtext.configs.derive import run_folder
from maxtext.configs.startup import configure_process
from maxtext.configs.types import MaxTextConfig
from maxtext.diagnostics.metrics import Recorder, make_writers
from maxtext.diagnostics.profiler import stack_traces
from maxtext.trainers.banner import read_summary, show_banner, stop_signal, summarize
from maxtext.trainers.checkpointing.export import save_results
from maxtext.trainers.checkpointing.save import Save, run_and_save
from maxtext.trainers.hooks import evaluation_hook, standard_hooks
from maxtext.trainers.loop import Hook, Loop
from maxtext.trainers.methods import method_of
from maxtext.trainers.methods.method import NO_USER_CODE, StepSetup, UserCode
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.run_setup import RunSetup, write_configuration
from maxtext.trainers.step import TrainState


@dataclass
class Result:
    context: RunContext
    state: TrainState
    summary: Json
    signal: int | None = None  # that ended the run before its steps were done


def train(
    config: MaxTextConfig,
    checkpoint: Checkpoint | None = None,
    hooks: Sequence[Hook] = (),
    user_code: UserCode = NO_USER_CODE,
) -> Result:
    """`checkpoint`: load_parameters_path, if it is open already. `hooks`: further ones."""
    configure_process(config)
    folder = Path(run_folder(config))
    check_writable(folder, "base_output_directory")
    with RunLock(folder) if jax.process_index() == 0 else contextlib.nullcontext():
        try:
            return train_locked(config, checkpoint, hooks, user_code)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            shortage = out_of_memory(error, method_of(config).batches.microbatch_key)
            if shortage is None:
                raise
            raise shortage from error


def train_locked(
    config: MaxTextConfig,
    checkpoint: Checkpoint | None,
    more_hooks: Sequence[Hook],
    user_code: UserCode,
) -> Result:
    """Train while this process holds the lock of the run's folder."""
    start_time = time.perf_counter()
    run = RunSetup.open(config, checkpoint)
    context, data_loader, start = run.context, run.data_loader, run.start
    config, method = context.config, method_of(context.config)
    if run.is_done:
        data_loader.close()
        return nothing_to_do(run)
    compiled = run.compile_first_step()
    initial = run.load_state()
    show_banner(context, compiled, start.origin)
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
            hooks = standard_hooks(context, recorder, start.step)
            if run.eval_streams is not None:
                hooks.append(
                    evaluation_hook(context, recorder, run.eval_streams, data_loader.add_fields)
                )
            train_step = method.wrap_step(
                StepSetup(
                    context,
                    run.step_cache,
                    data_loader,
                    first_step=start.step,
                    checkpoint=checkpoint,
                    user_code=user_code,
                )
            )
            hooks += [*method.hooks(train_step, recorder), *more_hooks]
            save = None
            if config.enable_checkpointing:
                save = Save(context, data_loader.source, start, initial.frozen_checksum)
                hooks.append(save)
                closing.callback(save.close)
            loop = Loop(
                initial.state,
                train_step,
                data_loader=data_loader,
                key=initial.key,
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


def nothing_to_do(run: RunSetup) -> Result:
    """The result of a run that had all its steps already. Nothing is written."""
    config, start = run.context.config, run.start
    LOGGER.info(
        "nothing to do: %s is at steps=%d already; raise steps to go on",
        start.origin,
        config.steps,
    )
    summary = read_summary(run_folder(config)) | {"steps": start.step}
    return Result(run.context, start.result()[0], summary=summary)
