"""File descriptors of the process."""

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Every connection needs a file descriptor: allow as many as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
