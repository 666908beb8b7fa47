"""`maxtext sft`: `maxtext train` with the preset sft.yml."""

from functools import partial

from maxtext.cli.train import run_method

run = partial(run_method, "sft")
