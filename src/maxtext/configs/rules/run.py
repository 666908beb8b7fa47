"""Rules of the run, compilation and debugging keys."""

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings


@rule("compile_topology_num_slices")
def topology_has_its_slices(settings: Settings) -> str | None:
    if settings.compile_topology and settings.compile_topology_num_slices == -1:
        return (
            f"compile_topology={settings.compile_topology} needs compile_topology_num_slices: how "
            "many slices, such as 1"
        )
    return None


@rule("compiled_trainstep_file")
def aot_compiles_one_program(settings: Settings) -> str | None:
    if settings.compiled_trainstep_file and settings.enable_rampup_batch_size:
        return (
            "compiled_trainstep_file holds one program, and enable_rampup_batch_size needs one "
            "per batch size: leave one out"
        )
    return None
