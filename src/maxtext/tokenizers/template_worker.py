"""The process that runs chat templates: `python -I template_worker.py SITE_PACKAGES SECONDS BYTES`.

A template is a program that came with a model. Jinja's sandbox denies it access to the machine's
files, but does not prevent endless loops or strings that fill the memory. Therefore templates run
in a process with limited memory, which `templates.py` kills if a template takes too long.

Messages on stdin and stdout are an 8-byte length and that many bytes: pickles to this process, and
JSON back, so that the main process never unpickles the output of a template.

`{% generation %} … {% endgeneration %}` writes the variables MARKS around its body. They are
undefined, and thus empty, unless the spans of these blocks are wanted. Then they are random texts,
which are removed from the output and give the spans.
"""

import json
import pickle
import re
import secrets
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

HEADER_BYTES = 8  # the length of a message
MAX_OUTPUT_CHARS = 2**28
MARKS = ("__generation_start", "__generation_end")
GRACE_SECONDS = 10  # after the time limit the process ends itself, if the main process is gone


@lru_cache(maxsize=16)
def compile_template(source: str) -> Any:
    """Compile in the environment of transformers' `apply_chat_template`."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            start, end = (nodes.Output([nodes.Name(mark, "load")]) for mark in MARKS)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope([start, *body, end]).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def respond(request: bytes) -> list[dict[str, object]]:
    """Render a template with each of several sets of variables; without any, only validate it.

    `request` is a pickled (source, sets of variables, wants_spans). A response is
    {"text", "spans"}, or {"error", "compiled", "line"} if the template fails. Never raises.
    """
    try:
        source, variable_sets, wants_spans = pickle.loads(request)
        template = compile_template(source)
    except BaseException as error:  # of the parser, or for lack of memory
        line = getattr(error, "lineno", None)
        return [{"error": describe(error), "line": line, "compiled": False}]
    return [render(template, variables, wants_spans) for variables in variable_sets]


def render(template: Any, variables: dict[str, object], wants_spans: bool) -> dict[str, object]:
    try:
        marks = {mark: f"{mark}{secrets.token_hex(16)}" for mark in MARKS if wants_spans}
        text = template.render(**variables, **marks)
        text, spans = extract_spans(text, *marks.values()) if marks else (text, [])
        if len(text) > MAX_OUTPUT_CHARS:
            reason = f"it writes {len(text):,} characters; the limit is {MAX_OUTPUT_CHARS:,}"
            return {"error": reason, "compiled": True}
        return {"text": text, "spans": spans}
    except BaseException as error:  # a template can raise any type
        return {"error": describe(error), "compiled": True}


def describe(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, RecursionError):
        return "it is nested too deeply or recurses endlessly"
    return " ".join(str(error).split()) or type(error).__name__


def extract_spans(marked: str, start: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks from a text. Returns the text and the (start, end) of what they enclosed."""
    text: list[str] = []
    spans: list[tuple[int, int]] = []
    length, depth, first = 0, 0, 0
    for part in re.split(f"({start}|{end})", marked):
        if part == start:
            first = length if depth == 0 else first
            depth += 1
        elif part == end:
            depth -= 1
            if depth == 0:
                spans.append((first, length))
        else:
            text.append(part)
            length += len(part)
    if depth:
        raise ValueError("it leaves a {% generation %} block by break or continue")
    return "".join(text), spans


def limit_memory(size: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, ValueError, OSError):
        pass  # the time limit remains


def serve(requests: BinaryIO, responses: BinaryIO, seconds: float) -> None:
    while header := requests.read(HEADER_BYTES):
        request = requests.read(int.from_bytes(header, "big"))
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)
        data = json.dumps(respond(request)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        responses.write(len(data).to_bytes(HEADER_BYTES, "big") + data)
        responses.flush()


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    import jinja2.sandbox  # noqa: F401  (before memory is limited)

    limit_memory(int(sys.argv[3]))
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[2]))
