"""Errors in functions of the user: data sources (custom.py), formatting functions, rewards and
environments."""

import traceback

from maxtext.common.errors import ConfigError, UserError


def failure(what: str, error: Exception) -> ConfigError:
    """A ConfigError about an exception in the user's code, with its traceback."""
    config_error = ConfigError(
        f"{what}: {' '.join(str(error).split()) or 'it has no message'}; its traceback follows"
    )
    config_error.details = traceback_of(error)
    return config_error


def run_failure(what: str, error: BaseException) -> UserError:
    """A UserError about an exception in the user's code during a run, with its traceback."""
    message = " ".join(str(error).split()) or "no message"
    user_error = UserError(f"{what}: {type(error).__name__}: {message}; its traceback follows")
    user_error.details = traceback_of(error)
    return user_error


def traceback_of(error: BaseException) -> str:
    """The traceback of the user's code, without the first frame, which is of the caller."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, frames))
