"""`maxtext compile`: compile the train step ahead of time, to a file that `maxtext train` loads.

The configuration is that of the devices of a named target, which need not be this machine's.
"""

import os
import time

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.train import open_model_checkpoint
from maxtext.common import log
from maxtext.common.errors import ConfigError
from maxtext.common.hardware import format_bytes
from maxtext.common.processes import choose_platform
from maxtext.configs import sources
from maxtext.configs.derive import Devices
from maxtext.configs.load import peek_setting
from maxtext.configs.startup import configure_compiler, configure_process, process_settings
from maxtext.configs.types import MaxTextConfig
from maxtext.sharding.topology import Target, disable_tpu_discovery, find_target
from maxtext.trainers.configuration import load_run


def run(arguments: Arguments) -> int:
    path, overrides = positionals.split(arguments.all_args)
    config, target = load_for_target(path, overrides)
    if not config.compiled_trainstep_file:
        raise ConfigError("maxtext compile needs a file to write: set compiled_trainstep_file=FILE")
    log.configure()
    from maxtext.trainers.build import build_run_context
    from maxtext.trainers.compilation import aot
    from maxtext.trainers.compilation.compile import lower_train_step
    from maxtext.trainers.memory.estimate import Program

    aot.check_writable(config.compiled_trainstep_file)
    start = time.perf_counter()
    context = build_run_context(config, target.devices())
    context.shardings.check()
    lowered = lower_train_step(context, config.global_batch_size_to_train_on)
    compiled = aot.compile_without_cache(context, lowered)
    program = Program.of(compiled)
    print(f"compiled for {target} in {time.perf_counter() - start:.1f} s")
    needed, temporary = format_bytes(program.needed), format_bytes(program.temporaries)
    print(f"a device needs {needed}, of it {temporary} temporary")
    file_size = aot.save(config.compiled_trainstep_file, context, lowered, compiled)
    print(f"wrote {format_bytes(file_size)} to {config.compiled_trainstep_file}")
    return 0


def load_for_target(
    path: str | None, overrides: list[str], name: str = "", slices: int = 0
) -> tuple[MaxTextConfig, Target]:
    """The target is that of `name`, else of compile_topology, else this machine."""
    layer = sources.from_overrides(overrides)
    topology = peek_setting("compile_topology", path, layer, os.environ) or ""
    if name and topology and name != topology:
        raise ConfigError(
            f"--target {name} and compile_topology={topology} name two targets: leave one out"
        )
    num_slices = slices
    if topology and not num_slices:
        text = str(peek_setting("compile_topology_num_slices", path, layer, os.environ))
        num_slices = int(text) if text.isdigit() else 1
    if not (name or topology):
        choose_platform(process_settings(path, layer).hardware)
    target = find_target(name or str(topology), num_slices or 1)
    if target.topology:
        disable_tpu_discovery()
    try:
        devices = Devices(target.count, target.slices, platform=target.platform)
        checkpoint = open_model_checkpoint(path, layer)
        config = load_run(path, layer, checkpoint, devices)
    except ConfigError as error:
        problems = list(error.problems)
        if any("devices" in problem or "slices" in problem for problem in problems):
            problems.append(f"the target is {target}")
        raise ConfigError(*problems) from error
    if topology and config.compile_topology_num_slices != target.slices:
        raise ConfigError(
            f"--slices {slices} and compile_topology_num_slices="
            f"{config.compile_topology_num_slices} differ: leave one out"
        )
    if name or topology:
        configure_compiler(config)
    else:
        configure_process(config)
    return config, target
