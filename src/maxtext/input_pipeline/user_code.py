"""Errors in functions of the user: data sources (custom.py) and formatting functions."""

import traceback

from maxtext.common.errors import ConfigError


def failure(what: str, error: Exception) -> ConfigError:
    """A ConfigError about an exception in the user's code, with its traceback."""
    config_error = ConfigError(
        f"{what}: {' '.join(str(error).split()) or 'it has no message'}; its traceback follows"
    )
    config_error.details = traceback_of(error)
    return config_error


def traceback_of(error: Exception) -> str:
    """The traceback of the user's code, without the first frame, which is of the caller."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, frames))
