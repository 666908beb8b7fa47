"""`maxtext distill`: `maxtext train` with the preset distill.yml."""

from functools import partial

from maxtext.cli.train import run_method

run = partial(run_method, "distill")
