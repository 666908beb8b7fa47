"""`maxtext dpo`: `maxtext train` with the preset dpo.yml."""

from functools import partial

from maxtext.cli.train import run_method

run = partial(run_method, "dpo")
