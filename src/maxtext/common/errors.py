"""Errors that are the user's to mend: shown as plain sentences, without a traceback, with their own
exit code.
"""

import re


class UserError(Exception):
    """Something outside the program is wrong; the message says what, where, and what to do.
    `details` are shown after it: the traceback of an error in the user's own code."""

    exit_code = 1
    details = ""


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
    """What a user can do about a device that ran out of memory, which JAX tells as an error of its
    runtime.
    """
    text = str(error)
    if (
        type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError")
        or "RESOURCE_EXHAUSTED" not in text
    ):
        return None
    if "shared memory" in text.lower():  # of a kernel, which nothing here would change
        return None
    wanted = re.search(r"allocate (?:request for )?(\d+ bytes|[\d.]+ ?\w*B)", text)
    return UserError(
        f"the device ran out of memory{f' when it needed {wanted[1]} more' if wanted else ''}: lower "
        "per_device_batch_size or max_target_length, or use more devices; in training a remat_policy that keeps less "
        "helps, and `maxtext estimate` says what fits; in inference quantization=int8 and quantize_kvcache=true do; "
        "--debug shows the error itself"
    )


# What the transports of collectives (Gloo, NCCL) and the coordination service say when a process is
# gone.
LOST_PEER = re.compile(
    r"gloo|connection (?:reset|closed|refused)|heartbeat|coordination service|broken pipe|nccl.*remote",
    re.IGNORECASE,
)

LOST_PEER_SENTENCE = (
    "the connection to another process of this run was lost, so this one ends, too: the log of the process that ended "
    "first says why"
)


def lost_peer(error: BaseException) -> UserError | None:
    """A sentence for the error by which a process of several learns that another one has ended."""
    text = str(error).strip()
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError") or not LOST_PEER.search(
        text
    ):
        return None
    return UserError(f"{LOST_PEER_SENTENCE}; --debug shows the error itself")
