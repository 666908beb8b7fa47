"""`maxtext orpo`: `maxtext train` with the preset orpo.yml."""

from functools import partial

from maxtext.cli.train import run_method

run = partial(run_method, "orpo")
