"""`maxtext compile`: compile the train step ahead of time, to a file that `maxtext train` loads."""

import time

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.targets import load_for_target
from maxtext.common import log
from maxtext.common.errors import ConfigError
from maxtext.common.hardware import format_bytes


def run(arguments: Arguments) -> int:
    path, overrides = positionals.split(arguments.all_words)
    config, target = load_for_target(path, overrides)
    if not config.compiled_trainstep_file:
        raise ConfigError("maxtext compile needs a file to write: set compiled_trainstep_file=FILE")
    log.configure()
    from maxtext.trainers.compilation import aot
    from maxtext.trainers.compilation.compile import lower_train_step
    from maxtext.trainers.memory.estimate import Program
    from maxtext.trainers.run_context import RunContext

    aot.check_writable(config.compiled_trainstep_file)
    start = time.perf_counter()
    context = RunContext.from_config(config, target.devices())
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
