"""The chat page: the files of `page/` as one document, with a policy that allows nothing else."""

import html
import json
import secrets
from collections.abc import Mapping
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

FILE = "index.html"
# Placeholders in the file, and what is filled in for every response.
PARTS = {"__STYLE__": "style.css", "__MARKDOWN__": "markdown.js", "__APP__": "app.js"}
NONCE, SERVER_INFO = "__NONCE__", "__SERVER__"
HEADERS = {
    "Cache-Control": "no-store",  # a nonce is for one response
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ChatPage:
    """The page of a server. `server_info` is what the page must know before its first request:
    whether a key is needed, and the defaults of sampling.
    """

    def __init__(self, server_info: Mapping[str, Any]):
        folder = resources.files(__package__).joinpath("page")
        source = folder.joinpath(FILE).read_text(encoding="utf-8")
        for placeholder, name in PARTS.items():
            text = folder.joinpath(name).read_text(encoding="utf-8")
            source = source.replace(placeholder, f"\n{text}")
        self.template = source.replace(SERVER_INFO, html.escape(json.dumps(server_info)))

    async def respond(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {**HEADERS, "Content-Security-Policy": content_security_policy(nonce)}
        return Response(self.template.replace(NONCE, nonce), 200, headers, media_type="text/html")


def content_security_policy(nonce: str) -> str:
    """Only the script and the style with this nonce, and requests to this server alone."""
    return "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "img-src 'self' data: blob:",
            f"style-src 'self' 'nonce-{nonce}'",
            f"script-src 'nonce-{nonce}'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
