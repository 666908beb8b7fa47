"""The process that runs chat templates: `python -I template_worker.py SITE_PACKAGES SECONDS BYTES`.

A template is a program that came with a model. Jinja's sandbox keeps it from the machine's files,
but not from endless loops or from strings that fill the memory. So templates run in a process with
a limit on its memory, which `templates.py` ends if a template takes too long.

Messages on stdin and stdout are a length of 8 bytes and so many bytes: pickles to this process, and
JSON back, so that the main process never unpickles what a template may have written.
"""

import json
import pickle
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

HEADER = 8  # bytes of a length
MAX_OUTPUT = 2**28  # characters of a text
GRACE_SECONDS = 10  # after which the process ends itself, if the main process is gone


@lru_cache(maxsize=16)
def compiled(source: str) -> Any:
    """The template in the environment of transformers' `apply_chat_template`."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True)
            ).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def answer(request: bytes) -> dict[str, Any]:
    """The text of a pickled (source, variables); without variables, whether the template is valid.
    Never raises.
    """
    template = None
    try:
        source, variables = pickle.loads(request)
        template = compiled(source)
        text = "" if variables is None else template.render(**variables)
        if len(text) > MAX_OUTPUT:
            return {
                "error": f"it writes {len(text):,} characters, and {MAX_OUTPUT:,} are the most",
                "compiled": True,
            }
        return {"text": text}
    except MemoryError:
        reason = "it needs too much memory"
    except RecursionError:
        reason = "it is nested too deeply, or calls itself without an end"
    except (
        BaseException
    ) as error:  # a template is a program of its own: any type may come out of it
        reason = " ".join(str(error).split()) or type(error).__name__
        if template is None:
            return {"error": reason, "line": getattr(error, "lineno", None), "compiled": False}
    return {"error": reason, "compiled": template is not None}


def limit_memory(size: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, ValueError, OSError):
        pass  # the limit on time remains


def serve(requests: BinaryIO, answers: BinaryIO, seconds: float) -> None:
    while header := requests.read(HEADER):
        request = requests.read(int.from_bytes(header, "big"))
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)
        data = json.dumps(answer(request)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(len(data).to_bytes(HEADER, "big") + data)
        answers.flush()


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    import jinja2.sandbox  # noqa: F401  (before the limit on memory)

    limit_memory(int(sys.argv[3]))
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[2]))
