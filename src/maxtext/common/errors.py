"""Errors that are the user's to mend: shown as plain sentences, without a traceback, with their own exit code."""

import re


class UserError(Exception):
    """Something outside the program is wrong; the message says what, where, and what to do."""

    exit_code = 1


class ConfigError(UserError):
    """A bad configuration. Holds every problem found, so that one run shows them all."""

    exit_code = 2

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class MissingExtra(UserError):
    """A feature whose optional packages are not installed."""

    exit_code = 2


def out_of_memory(error: BaseException) -> UserError | None:
    """What a user can do about a device that ran out of memory, which JAX tells as an error of its runtime."""
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError") or "RESOURCE_EXHAUSTED" not in str(error):
        return None
    wanted = re.search(r"allocate (\S+ ?\w*B|\d+ bytes)", str(error))
    return UserError(
        f"the device ran out of memory{f' when it needed {wanted[1]} more' if wanted else ''}: lower "
        "per_device_batch_size or max_target_length, choose a remat_policy that keeps less, or use more devices; "
        "`maxtext estimate` with the same words says what fits, and --debug shows the error itself"
    )
