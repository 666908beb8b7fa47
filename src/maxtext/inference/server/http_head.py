"""The head of a request: its size, and what RFC 9112 demands beyond what the parser checks."""

import re
from collections.abc import Sequence
from typing import Any

from maxtext.inference.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
VERSIONS = ("1.0", "1.1")
# The host of such a target counts, not the header Host, which the application checks.
ABSOLUTE_TARGET = re.compile(rb"[a-zA-Z][\w+.-]*://(?P<host>[^/?#]*)")


def check_head(
    method: bytes, url: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]
) -> ApiError | None:
    """The error of a head that the parser accepts and RFC 9112 does not, or that is too large.
    The names of `headers` are in lower case.
    """
    # A header also has a colon, a space and the end of its line.
    size = len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEAD_BYTES:
        return head_too_large()
    if method == b"CONNECT":  # the parser reads no body of it
        return invalid_request()
    if version not in VERSIONS:
        return ApiError(505, "this server's protocol is HTTP/1.1")
    values: dict[bytes, list[bytes]] = {b"host": [], b"transfer-encoding": []}
    for name, value in headers:
        if name in values:
            values[name].append(value.strip().lower())
    num_hosts = len(values[b"host"])
    if num_hosts > 1 or (not num_hosts and version != "1.0"):
        return ApiError(400, f"the request has {num_hosts} headers Host: send one")
    target = ABSOLUTE_TARGET.match(url)
    if target is not None and values[b"host"] != [target["host"].lower()]:
        return ApiError(400, "the target of the request and its header Host are two servers")
    if values[b"transfer-encoding"] not in ([], [b"chunked"]):
        return ApiError(400, "the body has a transfer coding: send plain JSON, or chunks of it")
    return None


def head_too_large() -> ApiError:
    return ApiError(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")


def invalid_request() -> ApiError:
    return ApiError(400, "this is no valid HTTP request")


def socket_address(name: Any) -> tuple[str, int | None] | None:
    """For the scope: (host, port), or (path, None) of a unix socket that has one."""
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])
    return (name, None) if name and isinstance(name, str) else None
