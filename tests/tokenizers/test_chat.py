"""Chat templates against transformers' apply_chat_template, and where a template is found."""

import json
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load as load_config
from maxtext.tokenizers import ChatTemplate, chat_template, load_tokenizer, template_process
from tests.tokenizers.tiny import CHATML

# Small templates in the styles of well-known models; each uses what the others do not.
TEMPLATES = {
    "chatml": CHATML,
    "llama3": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "gemma": """{{ bos_token }}{% for message in messages %}
  {% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "mistral": """{{ bos_token }}{% set state = namespace(turn=0) %}{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% if (message['role'] == 'user') != (state.turn % 2 == 0) %}
{{ raise_exception('roles must take turns') }}
{% endif %}{% set state.turn = state.turn + 1 %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% endif %}{% if state.turn > 8 %}{% break %}{% endif %}{% endfor %}""",
    "tools": """{% for message in messages %}{{ message | tojson }}
{{ message | tojson(indent=2) }}{% if tools %}never{% endif %}\
{% if message.extra is defined %}!{% endif %}
{% endfor %}{{ strftime_now('%Y') }} {{ documents is none }} {{ pad_token }}""",
}
CHATS = {
    "short": [{"role": "user", "content": "Hi <b>&</b> 'you'"}],
    "long": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "Was ist das? 日本 🙂"},
        {"role": "assistant", "content": "{% if %} {{ no template }}"},
        {"role": "user", "content": ""},
    ],
}


@pytest.fixture(scope="module")
def hf_tokenizer(bpe):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(bpe)


def load(path, *overrides):
    config = load_config(
        None, [f"tokenizer_path={path}", *overrides], environ={}, devices=Devices(1)
    )
    return chat_template(config, load_tokenizer(config))


@pytest.mark.slow
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", TEMPLATES)
def test_text_and_ids_equal_transformers(style, chat, add_generation_prompt, hf_tokenizer, bpe):
    config = load_config(None, [f"tokenizer_path={bpe}"], environ={}, devices=Devices(1))
    tokenizer = load_tokenizer(config)
    template = chat_template(
        config.model_copy(update={"chat_template": TEMPLATES[style]}), tokenizer
    )
    text = template.render(CHATS[chat], add_generation_prompt=add_generation_prompt)
    options = {"chat_template": TEMPLATES[style], "add_generation_prompt": add_generation_prompt}
    assert text == hf_tokenizer.apply_chat_template(CHATS[chat], tokenize=False, **options)
    expected = hf_tokenizer.apply_chat_template(
        CHATS[chat], tokenize=True, return_dict=True, **options
    )["input_ids"]
    assert tokenizer.encode_with_specials(text) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_it_has_in_transformers(name, hf_tokenizer):
    names = "{{ m.reasoning_content }} {{ m.thinking }} {{ m.content }}"
    source = f"{{% for m in messages %}}{names}{{% endfor %}}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "hm"}]
    expected = hf_tokenizer.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert ChatTemplate(source, "test").render(chat) == expected


@pytest.mark.parametrize("written", ["m['content']", "m.content", "m | tojson", "m.keys() | list"])
def test_null_fields_of_messages_are_absent_as_in_transformers(written, hf_tokenizer):
    """OpenAI's messages have content null beside tool_calls, and tool_calls null otherwise."""
    source = f"{{% for m in messages %}}{{{{ {written} }}}};{{% endfor %}}"
    call = {"type": "function", "id": None, "function": {"name": "f", "arguments": {"a": None}}}
    chat = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "b", "tool_calls": None, "thinking": None},
        {"role": "assistant", "content": "c", "thinking": None, "reasoning": "hm"},
    ]
    expected = hf_tokenizer.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert ChatTemplate(source, "test").render(chat) == expected


@pytest.mark.parametrize("content", ["```json\n", " a b ", "end", "<|im_end|>", "", "{{ no }}"])
@pytest.mark.parametrize("written", ["m.content", "m.content | trim"])
def test_message_to_continue_equals_transformers(content, written, hf_tokenizer):
    """Also where the end of a turn has the content, too."""
    turn = f"<|im_start|>{{{{ m.role }}}}\n{{{{ {written} }}}}<|im_end|>\n"
    source = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    expected = hf_tokenizer.apply_chat_template(
        chat, chat_template=source, tokenize=False, continue_final_message=True
    )
    assert ChatTemplate(source, "test").render_open(chat) == expected


def test_message_to_continue_must_have_content():
    template = ChatTemplate("{{ messages[0].content }}", "test")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match="leaves out the last message"):
        template.render_open(chat)
    with pytest.raises(UserError, match="no content"):
        template.render_open([{"role": "assistant", "content": None}])


def test_reads_the_template_in_the_tokenizer_folder(bpe, tmp_path):
    assert load(bpe).source == CHATML
    shutil.copytree(bpe, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the file"}')
    assert load(tmp_path).source == CHATML  # transformers' processors alone read the file
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load(tmp_path).source == "of the file"
    (tmp_path / "chat_template.jinja").write_text("of the jinja file")
    assert load(tmp_path).source == "of the jinja file"


NAMED = {
    "default": "D{{ messages[0].content }}",
    "tool_use": "T{{ messages[0].content }}{{ tools | tojson }}",
    "rag": "R{{ messages[0].content }}",
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
SEVERAL = {  # files of a tokenizer's folder
    "folder": {
        "chat_template.jinja": NAMED["default"],
        **{f"additional_chat_templates/{n}.jinja": NAMED[n] for n in ("tool_use", "rag")},
    },
    "list": {"chat_template": [{"name": n, "template": t} for n, t in NAMED.items()]},
    "file and list": {
        "chat_template.jinja": "file",
        "chat_template": [{"name": n, "template": t} for n, t in NAMED.items()],
    },
    "folder and entry": {
        "additional_chat_templates/default.jinja": NAMED["default"],
        "additional_chat_templates/tool_use.jinja": NAMED["tool_use"],
        "chat_template": "entry",
    },
    "processor": {
        "chat_template.json": json.dumps({"chat_template": "older"}),
        "chat_template": NAMED["default"],
    },
}


@pytest.fixture(params=SEVERAL)
def several(request, bpe, tmp_path):
    """A tokenizer's folder with several templates."""
    shutil.copytree(bpe, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    for name, value in SEVERAL[request.param].items():
        if name == "chat_template":
            settings[name] = value
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(value)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("tools", [None, [], [TOOL]])
@pytest.mark.parametrize("name", [None, "rag", "tool_use", "default", "{{ 1 }}"])
def test_chooses_among_several_templates_as_transformers(several, name, tools):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(several)
    chat = [{"role": "user", "content": "q"}]
    expected = tokenizer.apply_chat_template(chat, tools, chat_template=name, tokenize=False)
    template = load(several, *([f"chat_template={name}"] if name else []))
    assert template.render(chat, variables={} if tools is None else {"tools": tools}) == expected


def test_several_templates_without_a_default_need_a_name(bpe, tmp_path):
    shutil.copytree(bpe, tmp_path, dirs_exist_ok=True)
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    with pytest.raises(ConfigError, match="rag, tool_use, and none is called default"):
        load(tmp_path)
    assert load(tmp_path, "chat_template=rag").source == NAMED["rag"]


def test_invalid_template_of_several_is_reported():
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("fine", "test", tool_use="{% if %}")


def test_reads_the_template_next_to_a_sentencepiece_model(sentencepiece_file, tmp_path):
    shutil.copy(sentencepiece_file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ bos_token }}x"}')
    assert load(tmp_path).render([]) == "<s>x"


def test_config_overrides_the_template(bpe, tmp_path):
    assert load(bpe, "chat_template={{ eos_token }}").render([]) == "</s>"
    (tmp_path / "chat.jinja").write_text(
        "a\n{% for m in messages %}\n{{ m.content }}\n{% endfor %}\n"
    )
    assert (
        load(bpe, f"chat_template_path={tmp_path}/chat.jinja").render([{"content": "b"}])
        == "a\nb\n"
    )
    (tmp_path / "other.json").write_text('{"chat_template": "c"}')
    assert load(bpe, f"chat_template_path={tmp_path}/other.json").render([]) == "c"


def test_raises_if_a_required_template_is_missing(sentencepiece_file):
    for path in ("byte", sentencepiece_file):
        assert load(path) is None
        with pytest.raises(
            ConfigError,
            match="use_chat_template=true, but the tokenizer .* has no chat template",
        ):
            load(path, "use_chat_template=true")
    assert (
        load(sentencepiece_file, "use_chat_template=true", "chat_template={{ bos_token }}").render(
            []
        )
        == "<s>"
    )
    assert (
        load("byte", "use_chat_template=true", "chat_template={{ bos_token }}x").render([]) == "x"
    )


def test_template_can_be_pickled(bpe):
    template = pickle.loads(pickle.dumps(load(bpe)))
    assert template.render(CHATS["short"]) == load(bpe).render(CHATS["short"])


def test_accepts_messages_as_tuples_and_arrays(bpe):
    expected = load(bpe).render(CHATS["long"])
    assert load(bpe).render(tuple(CHATS["long"])) == expected
    assert load(bpe).render(np.array(CHATS["long"], object)) == expected


@pytest.mark.parametrize("bad", [None, "text", ["text"], {"role": "user"}, [None], 3])
def test_rejects_messages_that_are_no_conversation(bad, bpe):
    with pytest.raises(
        UserError, match="a conversation is a list of records with role and content, not"
    ):
        load(bpe).render(bad)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ messages[5].content.x }}", "has no element 5|undefined"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_reports_errors_raised_by_a_template(source, reason):
    with pytest.raises(UserError, match=f"the chat template of here refuses .*({reason})"):
        ChatTemplate(source, "here").render(CHATS["short"])


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set n = namespace(x=['aaaaaaaa']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% "
    "endfor %}"
)
HOSTILE = {
    "endless loop": (ENDLESS, "takes more than 0.5 seconds"),
    "endless filter": (
        "{{ range(99999)|map('string')|list * 0 }}" + ENDLESS,
        "takes more than 0.5 seconds",
    ),
    "power at compile time": ("{{ 10 ** (10 ** 10) }}", "takes more than 0.5 seconds"),
    "range": ("{% for a in range(10 ** 12) %}{% endfor %}", "Range too big"),
    "string": ("{{ 'a' * 10 ** 11 }}", "memory"),
    "padding": ("{{ 'a'.ljust(10 ** 11) }}", "memory"),
    "format": ("{{ '%99999999999d' % 1 }}", "memory|width|big"),
    "shared lists": (DOUBLED + "{{ n.x }}", "takes more than 0.5 seconds|memory"),
    "doubled text": (
        DOUBLED.replace("['aaaaaaaa']", "'aa'").replace("[n.x, n.x]", "n.x ~ n.x"),
        "memory|seconds",
    ),
    "recursion": (
        "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(0) }}",
        "recurses endlessly",
    ),
    "nested expression": (
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "nested too deeply|memory|died",
    ),
    "class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
    "format string": ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    "mapped attribute": (
        "{{ ([''] | map(attribute='__class__') | list)[0].x }}",
        "unsafe|undefined",
    ),
    "attribute filter": ("{{ (''|attr('__class__')).__mro__ }}", "unsafe|undefined"),
    "changed messages": ("{{ messages.clear() }}", "not safely callable|unsafe"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_becomes_a_one_line_error(name, monkeypatch):
    """Endless loops, memory bombs and sandbox escapes; the next template renders as usual."""
    source, reason = HOSTILE[name]
    monkeypatch.setattr(template_process, "RENDER_SECONDS", 0.5)
    monkeypatch.setattr(template_process, "MEMORY_BYTES", 2**28)
    template_process.RUNNER.stop()  # a worker with other limits
    began = time.monotonic()
    with pytest.raises(UserError, match=f"the chat template of here .*({reason})") as refusal:
        ChatTemplate(source, "here").render(CHATS["short"])
    assert time.monotonic() - began < 30  # with the start of the process, on a busy machine
    assert "\n" not in str(refusal.value)
    monkeypatch.undo()
    assert ChatTemplate("{{ messages[0].content }}", "here").render([{"content": "next"}]) == "next"
    template_process.RUNNER.stop()


def test_templates_work_in_threads_and_forked_processes(bpe):
    template, expected = load(bpe), load(bpe).render(CHATS["short"])
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: template.render(CHATS["short"]), range(40)))
    assert set(texts) == {expected}
    code = (
        "import os\nfrom maxtext.tokenizers import ChatTemplate\n"
        "t = ChatTemplate('{{ messages[0].a }}', 'here')\nchild = os.fork()\n"
        "assert all(t.render([{'a': n}]) == str(n) for n in range(200))\n"
        "os._exit(0) if child == 0 else None\nassert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_reports_messages_that_cannot_be_pickled():
    with pytest.raises(UserError, match="cannot be sent"):
        ChatTemplate("{{ messages }}", "here").render([{"content": lambda: 0}])


def test_reports_invalid_templates_and_files(bpe, tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError, match="the chat template of chat_template, line 2 is not valid Jinja"
    ):
        load(bpe, "chat_template=a\n{% if %}")
    for name in ("no.jinja", "no.json"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            load(bpe, f"chat_template_path={tmp_path}/{name}")
    for name, text in (("a.json", "{}"), ("b.json", '{"chat_template": 3}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f"{name} has no text under chat_template"):
            load(bpe, f"chat_template_path={tmp_path}/{name}")
