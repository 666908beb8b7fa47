"""`maxtext grpo`: `maxtext train` with the preset grpo.yml."""

from functools import partial

from maxtext.cli.train import run_method

run = partial(run_method, "grpo")
