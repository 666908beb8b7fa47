"""Errors that are the user's to mend: shown as plain sentences, without a traceback, with their own exit code."""


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
