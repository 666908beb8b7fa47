"""A server in this process."""

import contextlib

from maxtext.inference import AsyncEngine
from maxtext.inference.server.app import ServerOptions, build_app
from maxtext.inference.server.lifecycle import HttpServer, bind
from maxtext.inference.server.model import ServedModel
from maxtext.tokenizers import ChatTemplate

KEY = "sk-test"
TEMPLATE = (
    "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if thinking %}w7 {% endif %}{% if add_generation_prompt %}w9{% endif %}"
)


@contextlib.contextmanager
def run_server(llm, max_queue=200, slots=8, length=128, parsers=("none", "none"), **options):
    """(model, base URL) of a server on a free port; `parsers` are those of calls and reasoning."""
    engine = AsyncEngine(llm, slots=slots, length=length, max_queue=max_queue)
    template = ChatTemplate(TEMPLATE, "this model", llm.tokenizer.special_tokens)
    model = ServedModel(llm, engine, llm.tokenizer, ["tiny", "alias"], chat_template=template)
    model.tool_parser, model.reasoning_parser = parsers
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(build_app(model, ServerOptions(**options)), listener)
    server.start()
    try:
        yield model, f"http://127.0.0.1:{port}"
    finally:
        server.stop()
        engine.close()
