"""Errors that the user can fix: shown as one sentence without a traceback, with an exit code."""

import contextlib
import re
from collections.abc import Iterator


class UserError(Exception):
    """Something outside the program is wrong; the message says what, where, and what to do.

    `details` follow the message: the traceback of an error in the user's own code.
    """

    exit_code = 1
    details = ""


class ConfigError(UserError):
    """An invalid configuration, with all of its problems, so that one run reports them all."""

    exit_code = 2

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class MissingExtra(UserError):
    """A feature whose optional packages are not installed."""

    exit_code = 2


@contextlib.contextmanager
def as_config_error() -> Iterator[None]:
    """Turns a UserError into a ConfigError: what a key names cannot be used."""
    try:
        yield
    except UserError as error:
        if error.exit_code == ConfigError.exit_code:
            raise
        raise ConfigError(str(error)) from error


def out_of_memory(
    error: BaseException, batch_key: str = "per_device_batch_size"
) -> UserError | None:
    """Advice for an error of JAX or Python that says a device or the host ran out of memory; None
    for others. `batch_key`: the key that sets the size of a batch."""
    text = str(error)
    if isinstance(error, MemoryError):
        return UserError(
            f"this machine ran out of memory{f' ({text})' if text else ''}: lower {batch_key}, use "
            "a smaller model or a machine with more memory; --debug shows the error itself"
        )
    if (
        type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError")
        or "RESOURCE_EXHAUSTED" not in text
    ):
        return None
    if "shared memory" in text.lower():  # of a GPU kernel: none of the advice below helps
        return None
    request = re.search(r"allocate (?:request for )?(\d+ bytes|[\d.]+ ?\w*B)", text)
    amount = f" when it needed {request[1]} more" if request else ""
    return UserError(
        f"the device ran out of memory{amount}: lower {batch_key} or max_target_length, "
        "or use more devices; in training a remat_policy that saves less helps, and "
        "`maxtext estimate` says what fits; in inference quantization=int8 and "
        "quantize_kvcache=true do; --debug shows the error itself"
    )


# Messages of the transports (Gloo, NCCL) and the coordination service after a process has ended.
LOST_PEER = re.compile(
    r"gloo|connection (?:reset|closed|refused)|heartbeat|coordination service|broken pipe"
    r"|nccl.*remote",
    re.IGNORECASE,
)

LOST_PEER_SENTENCE = (
    "the connection to another process of this run was lost, so this process ends, too: "
    "the log of the process that ended first says why"
)


def lost_peer(error: BaseException) -> UserError | None:
    """A UserError for a JAX runtime error that says another process has ended; None for others."""
    text = str(error).strip()
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError") or not LOST_PEER.search(
        text
    ):
        return None
    return UserError(f"{LOST_PEER_SENTENCE}; --debug shows the error itself")
