"""`maxtext doctor`: reports what this machine can run, and problems with remedies."""

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.configs.derive import Devices
from maxtext.diagnostics.doctor import diagnose
from maxtext.models.configuration import load


def run(arguments: Arguments) -> int:
    path, overrides = positionals.split(arguments.all_args)
    # Must work on a machine where no device starts, so JAX is not asked for devices here.
    report = diagnose(load(path, overrides, devices=Devices(1)).base_output_directory)
    for title, lines in report.sections.items():
        print(title)
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            print(f"  {name:{width}}  {value}")
        print()
    if not report.problems:
        print("No problems found.")
        return 0
    print("Problems")
    for problem, remedy in report.problems:
        print(f"  {problem}\n    -> {remedy}")
    return 1
