"""The chat page: its response, and what it does in Chromium."""

import json
import re
import time
from pathlib import Path

import httpx
import pytest

from tests.inference.server.local_server import KEY, run_server
from tests.inference.server.stub_api import Reply, run_stub
from tests.support.server_client import greedy, text_of

BROWSERS = [
    Path("/usr/bin", name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
]
MAX_BYTES = 150_000
SECONDS = 60  # to wait for something: the first answer of the real server compiles programs
ENDLESS = Reply("word ", part=5, seconds=0.02, is_endless=True)


# The response.


def test_page_is_one_document_with_a_policy(server):
    responses = [httpx.get(server[1] + "/", timeout=60) for _ in range(2)]
    nonces = set()
    for response in responses:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        assert len(response.content) < MAX_BYTES
        policy = dict(
            part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
        )
        nonce = re.fullmatch(r"'nonce-([\w-]{16,})'", policy["script-src"])[1]
        assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
        assert re.findall(r"<(?:script|style)\b[^>]*", response.text) == [
            f'<style nonce="{nonce}"',
            f'<script nonce="{nonce}"',
        ]
        nonces.add(nonce)
    assert len(nonces) == 2
    assert not re.findall(r"""(?:src|href|url\()\s*=?\s*["'(]?(?:https?:)?//""", response.text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(", response.text)


def test_page_tells_what_the_server_needs_but_no_key(server, llm):
    assert "&quot;needs_key&quot;: true" in httpx.get(server[1] + "/", timeout=60).text
    assert KEY not in httpx.get(server[1] + "/", timeout=60).text
    with run_server(llm, has_page=False) as (_, url):
        assert httpx.get(url + "/", timeout=60).status_code == 404
        assert httpx.get(url + "/v1/models", timeout=60).status_code == 200


# In Chromium.


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((path for path in BROWSERS if path.exists()), None)
    if path is None:
        pytest.skip(f"there is no Chromium at {BROWSERS[0]}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def problems():
    """Messages on the console that are errors; a test removes those that it expects."""
    found = []
    yield found
    assert found == []


@pytest.fixture
def open_page(browser, problems):
    """Opens an address in a window of its own, with an empty storage."""
    contexts = []

    def open_address(url, path="/"):
        context = browser.new_context(viewport={"width": 1200, "height": 800})
        contexts.append(context)
        context.set_default_timeout(SECONDS * 1000)
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and problems.append(m.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url + path)
        return page

    yield open_address
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def stub_server():
    with run_stub(models=("one", "two"), facts={"defaults": {"temperature": 0.6}}) as server:
        yield server


@pytest.fixture
def stub(stub_server):
    stub = stub_server[0]
    stub.replies, stub.bodies, stub.num_cancelled = [Reply("Hello.")], [], 0
    stub.key = stub.prefix = ""
    stub.health = {}
    return stub


@pytest.fixture
def page(stub, stub_server, open_page):
    return open_page(stub_server[1])


def send(page, text):
    box = page.get_by_role("textbox", name="Message")
    box.fill(text)
    box.press("Enter")


def ask(page, text):
    """Send a text and return the answer when it is complete."""
    send(page, text)
    return wait_for_answer(page)


def wait_for_answer(page):
    page.get_by_role("button", name="Regenerate").wait_for()
    return page.locator("[data-role=assistant]").last


def wait_for_text(page, text):
    """In what is seen: screen readers hear it, too, from elsewhere in the document."""
    page.locator("main, #toasts").get_by_text(text).first.wait_for()


def contents(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.02)


def test_real_server_answers_as_transformers(server, model, open_page):
    page = open_page(server[1])
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Settings").first.click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("20")
    page.get_by_role("button", name="Done").click()
    answer = ask(page, "w5 w12")
    new, _ = greedy(model, [5, 12, 9], 20)
    assert answer.locator(".markdown").inner_text().split() == text_of(new).split()
    assert f"{len(new)} tokens" in answer.locator(".stats").inner_text()
    assert page.get_by_label("API key").count() == 0
    assert page.get_by_role("combobox", name="Model").input_value() == "tiny"
    page.reload()
    assert wait_for_answer(page).locator(".markdown").inner_text().split() == text_of(new).split()


def test_send_and_history(page, stub):
    stub.replies = [Reply("First."), Reply("Second.")]
    box = page.get_by_role("textbox", name="Message")
    box.fill("one")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    box.press("Enter")
    assert "First." in wait_for_answer(page).inner_text()
    assert "34 tokens" in page.locator(".stats").inner_text()
    assert "Second." in ask(page, "three").inner_text()
    assert contents(stub.bodies[1]) == [
        ("user", "one\ntwo"),
        ("assistant", "First."),
        ("user", "three"),
    ]
    assert stub.bodies[0]["model"] == "one"
    assert "temperature" not in stub.bodies[0]
    live = page.locator("[aria-live=polite]").inner_text()
    assert "Second." in live
    assert "The answer is complete." in live


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stop_keeps_the_text_and_cancels_the_request(by, page, stub):
    stub.replies = [ENDLESS, Reply("Another.")]
    send(page, "go")
    wait_for_text(page, "word word")
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    assert "word word" in wait_for_answer(page).inner_text()
    assert page.get_by_role("button", name="Stop").count() == 0
    wait_until(lambda: stub.num_cancelled == 1)
    page.get_by_role("button", name="Regenerate").click()
    wait_for_text(page, "Another.")
    assert page.locator("[data-role=assistant]").count() == 1
    assert contents(stub.bodies[1]) == [("user", "go")]


def test_edit_drops_what_follows(page, stub):
    ask(page, "first")
    ask(page, "second")
    page.get_by_role("button", name="Edit").first.click()
    field = page.get_by_role("textbox", name="New text")
    assert field.input_value() == "first"
    field.press("Escape")
    assert page.locator("[data-role=user]").count() == 2
    page.get_by_role("button", name="Edit").first.click()
    field.fill("changed")
    page.get_by_role("button", name="Save and send").click()
    wait_for_answer(page)
    assert page.locator("[data-role=user] .text").all_inner_texts() == ["changed"]
    assert contents(stub.bodies[-1]) == [("user", "changed")]


def test_copy(browser, page, stub):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    stub.replies = [Reply("Some **bold** text.\n\n```python\nx = '<b>'\n```\n")]
    answer = ask(page, "go")
    answer.get_by_role("button", name="Copy", exact=True).click()
    answer.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == stub.replies[0].text
    answer.get_by_role("button", name="Copy code").click()
    wait_until(lambda: page.evaluate("navigator.clipboard.readText()") == "x = '<b>'")


def test_reload_keeps_conversations_settings_and_a_broken_answer(page, stub):
    ask(page, "hello there")
    page.keyboard.press("Control+,")
    page.get_by_label("System prompt of all conversations").fill("Be brief.")
    page.get_by_label("Stop strings").fill("END\nSTOP")
    page.get_by_label("Thinking").select_option("off")
    page.keyboard.press("Escape")
    page.get_by_role("combobox", name="Model").select_option("two")
    stub.replies = [ENDLESS, Reply("Whole.")]
    send(page, "again")
    wait_for_text(page, "word word")
    page.get_by_role("textbox", name="Message").fill("a draft")
    page.reload()
    assert "The text so far is kept." in wait_for_answer(page).inner_text()
    assert "word word" in page.locator("[data-role=assistant]").last.inner_text()
    assert page.get_by_role("textbox", name="Message").input_value() == "a draft"
    page.get_by_role("button", name="Regenerate").click()
    wait_for_text(page, "Whole.")
    body = stub.bodies[-1]
    assert contents(body)[0] == ("system", "Be brief.")
    assert (body["stop"], body["model"]) == (["END", "STOP"], "two")
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_conversations(page, stub, tmp_path):
    ask(page, "apples")
    page.keyboard.press("Control+k")
    assert page.locator("[data-role=user]").count() == 0
    ask(page, "pears")
    titles = page.get_by_role("navigation").locator(".conversation")
    assert titles.all_inner_texts() == ["pears", "apples"]
    page.get_by_role("button", name="Rename").first.click()
    page.get_by_role("textbox", name="Title").fill("Fruit")
    page.keyboard.press("Enter")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    saved = json.loads(file.read_text())
    assert [each["title"] for each in saved["conversations"]] == ["apples", "Fruit"]
    page.get_by_role("button", name="Delete").first.click()
    assert titles.all_inner_texts() == ["apples"]
    page.get_by_role("button", name="Undo").click()
    assert sorted(titles.all_inner_texts()) == ["Fruit", "apples"]
    page.get_by_label("File to import").set_input_files(file)
    wait_for_text(page, "2 conversations are imported.")
    assert sorted(titles.all_inner_texts()) == ["Fruit", "Fruit", "apples", "apples"]
    (tmp_path / "other.json").write_text('{"conversations": [{"id": 1}]}')
    page.get_by_label("File to import").set_input_files(tmp_path / "other.json")
    wait_for_text(page, "This file has no exported conversations.")
    assert titles.count() == 4


def test_wrong_key_is_asked_for_again(page, stub, problems):
    stub.key = "right"
    send(page, "hello")
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    wait_for_text(page, "The server does not accept this key.")
    page.get_by_label("API key").fill("right")
    page.get_by_label("API key").press("Enter")
    wait_for_text(page, "Hello.")
    assert page.get_by_label("API key").count() == 0
    assert page.evaluate("JSON.stringify(localStorage)").count("right") == 0
    # Chromium reports every response with an error on the console.
    problems[:] = [text for text in problems if "401" not in text]


def test_text_is_not_sent_without_the_key_that_the_server_needs(server, open_page):
    page = open_page(server[1])
    send(page, "w5")
    assert page.evaluate("document.activeElement.id") == "key-input"
    assert page.locator("[data-role]").count() == 0
    assert page.get_by_role("textbox", name="Message").input_value() == "w5"


@pytest.mark.parametrize("path", ["/llm/", "/llm"])
def test_works_behind_a_prefix(path, stub, stub_server, open_page):
    stub.prefix = "/llm"
    page = open_page(stub_server[1], path)
    assert "Hello." in ask(page, "hi").inner_text()
    assert page.get_by_role("combobox", name="Model").input_value() == "one"


def test_quick_answer_still_shows_stop_for_a_moment(page, stub):
    ask(page, "hi")
    page.get_by_role("button", name="Stop").click()
    assert "Hello." in page.locator("[data-role=assistant]").inner_text()
    assert page.get_by_role("button", name="Send").is_visible()


def test_busy_server_is_asked_again(page, stub, problems):
    stub.replies = [Reply(status=429, headers={"Retry-After": "1"}), Reply("At last.")]
    send(page, "hello")
    wait_for_text(page, "Trying again in 1 s")
    assert "At last." in wait_for_answer(page).inner_text()
    problems[:] = [text for text in problems if "429" not in text]


def test_errors_and_cut_streams_are_shown(page, stub, problems):
    stub.replies = [Reply("Half of", is_cut=True), Reply(status=400)]
    answer = ask(page, "go")
    assert "Half of" in answer.inner_text()
    assert "The text so far is kept." in answer.inner_text()
    assert "the stub refuses" in ask(page, "again").inner_text()
    problems[:] = [text for text in problems if "400" not in text]


@pytest.mark.parametrize("cut", ["length", "stop", "connection"])
def test_continue_goes_on_with_the_same_answer(cut, page, stub):
    replies = {
        "length": Reply("One two", reasoning="Hm.", finish_reason="length"),
        "stop": ENDLESS,
        "connection": Reply("One two", is_cut=True),
    }
    stub.replies = [replies[cut], Reply(" three.")]
    send(page, "go")
    if cut == "stop":
        wait_for_text(page, "word word")
        page.get_by_role("button", name="Stop").click()
    before = wait_for_answer(page).locator(".markdown").inner_text()
    page.get_by_role("button", name="Continue").click()
    wait_for_text(page, "three.")
    answer = wait_for_answer(page)
    whole = answer.locator(".markdown").inner_text()
    assert whole.startswith(before)
    assert whole.endswith(" three.")
    assert page.get_by_role("button", name="Continue").count() == 0
    assert page.locator("[data-role=assistant]").count() == 1
    assert "kept" not in answer.inner_text()
    body = stub.bodies[1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    user, last = body["messages"]
    assert user == {"role": "user", "content": "go"}
    assert last["content"].strip() == before.strip()
    assert last.get("reasoning_content") == ("Hm." if cut == "length" else None)
    assert "continue_final_message" not in stub.bodies[0]


def test_time_is_shown_while_waiting(page, stub):
    stub.replies = [Reply("Late.", wait=1.5)]
    send(page, "go")
    page.locator("[data-role=assistant]").get_by_text(re.compile(r"^[1-9]\d* s$")).wait_for()
    assert "Late." in wait_for_answer(page).inner_text()


def test_program_that_is_compiled_is_shown_while_waiting(page, stub):
    """Not after the first token, and not with an answer that comes at once."""
    compiling = {"program": "decode of 4 sequences", "seconds": 3.0, "num_compiled": 6}
    stub.health = {"compiling": compiling}
    stub.replies = [Reply("At once."), Reply("Late.", wait=4)]
    assert "compiling" not in ask(page, "go").inner_text()
    send(page, "go")
    wait_for_text(page, "compiling program 7 (decode of 4 sequences)")
    stub.health = {}
    answer = page.locator("[data-role=assistant]").nth(1)
    answer.get_by_text("3 s", exact=True).wait_for()
    wait_until(lambda: "compiling" not in answer.inner_text())
    assert "Late." in wait_for_answer(page).inner_text()


def test_system_prompt_of_one_conversation(page, stub):
    def set_prompt(which, text):
        page.keyboard.press("Control+,")
        page.get_by_label(f"System prompt of {which}").fill(text)
        page.keyboard.press("Escape")

    set_prompt("all conversations", "Be brief.")
    set_prompt("this conversation", "Be long.")
    ask(page, "a")
    page.reload()
    wait_for_answer(page)
    ask(page, "b")
    page.keyboard.press("Control+k")
    ask(page, "c")
    systems = [contents(body)[0] for body in stub.bodies]
    assert systems == [("system", text) for text in ("Be long.", "Be long.", "Be brief.")]


def test_whole_name_of_the_model_on_phones(open_page):
    name = "organisation/Some-Model-3.3-70B-Instruct-FP8"
    with run_stub(models=(name,)) as (_, url):
        page = open_page(url)
        page.set_viewport_size({"width": 390, "height": 700})
        select = page.get_by_role("combobox", name="Model")
        wait_until(lambda: select.evaluate("node => node.value") == name)
        assert select.is_visible()
        needed = """node => {
          const style = getComputedStyle(node);
          const context = new OffscreenCanvas(1, 1).getContext("2d");
          context.font = style.font;
          const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
          return context.measureText(node.value).width + padding;
        }"""
        assert select.evaluate(needed) < select.bounding_box()["width"]


def test_reasoning_and_calls(page, stub):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": '{"x": 1}'}}
    stub.replies = [Reply("Done.", reasoning="Let me see.", tool_calls=[call, rest])]
    answer = ask(page, "go")
    assert not answer.get_by_text("Let me see.").is_visible()
    answer.locator("summary").click()
    assert answer.get_by_text("Let me see.").is_visible()
    assert "Call of f" in answer.inner_text()
    assert '"x": 1' in answer.inner_text()
    ask(page, "more")
    assert stub.bodies[1]["messages"][1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]


INJECTION = """\
<img src=x onerror="document.title='hacked'"> and <script>document.title='hacked'</script>

[run](javascript:document.title='hacked') [tab](java\tscript:alert(1)) [data](data:text/html,x)
![image](https://example.com/x.png) [relative](/metrics) <javascript:alert(1)>

```html
<img src=x onerror="document.title='hacked'">
```

| <b>a</b> | [b](javascript:alert(1)) |
|---|---|
| <i>c</i> | d |
"""


def test_markup_of_a_model_is_inert(page, stub):
    stub.replies = [Reply(INJECTION)]
    answer = ask(page, "go")
    assert answer.locator("img, script, b, i, iframe").count() == 0
    links = answer.locator("a")
    assert links.evaluate_all("all => all.map((link) => link.href)") == [
        "https://example.com/x.png"
    ]
    assert links.first.get_attribute("rel") == "noopener noreferrer"
    assert "<img src=x onerror=" in answer.inner_text()
    assert page.title() == "go · MaxText chat"


MARKDOWN = """\
# Title

A *paragraph* with **bold**, ***both***, `code *x*`, ~~old~~, snake_case_name, 2 * 3 * 4
and https://example.com/a_(b).

1. one
   - inner
2. two

> quoted

| a | b |
|:--|--:|
| 1 | `x|y` |

```python
def f(): return "text"  # note
```
---
- [x] task
"""


def test_markdown(page, stub):
    stub.replies = [Reply(MARKDOWN, part=3)]
    answer = ask(page, "go").locator(".markdown")
    shape = answer.evaluate("node => [...node.children].map((child) => child.tagName)")
    assert shape == ["H1", "P", "OL", "BLOCKQUOTE", "DIV", "DIV", "HR", "UL"]
    texts = {
        "h1": ["Title"],
        "p > em": ["paragraph"],
        "p > strong": ["bold", "both"],
        "p > code": ["code *x*"],
        "del": ["old"],
        "a": ["https://example.com/a_(b)"],
        "ol > li > ul > li": ["inner"],
        "td": ["1", "x|y"],
        ".end": ["b", "x|y"],
        ".token-keyword": ["def", "return"],
        ".token-function": ["f"],
        ".token-string": ['"text"'],
        ".token-comment": ["# note"],
        "li.task": ["☑ task"],
    }
    found = {selector: answer.locator(selector).all_inner_texts() for selector in texts}
    assert found == texts
    assert "snake_case_name, 2 * 3 * 4" in answer.inner_text()


TRICKY = """\
text
#tag and text
- item

  more of it
-- no item
1. one
2) two
```c
int x;


```` no end
~~~
text
| a | b
|--|--
| c
end
Title
=====
>quote
lazy
"""


@pytest.mark.parametrize("text", [MARKDOWN, INJECTION, TRICKY])
def test_grown_text_is_drawn_as_a_whole_one(text, page):
    script = """([text, step]) => {
      const view = new MarkdownView();
      for (let end = step; end <= text.length; end += step) view.update(text.slice(0, end));
      return view.node.innerHTML;
    }"""
    assert page.evaluate(script, [text, 1]) == page.evaluate(script, [text, len(text)])


def test_finished_blocks_are_not_drawn_again(page):
    is_same = """() => {
      const view = new MarkdownView();
      view.update("first\\n\\nsecond");
      const nodes = [...view.node.children];
      view.update("first\\n\\nsecond and more\\n\\nthird");
      return nodes.map((node, index) => node === view.node.children[index]);
    }"""
    assert page.evaluate(is_same) == [True, False]


HOSTILE = ["https://a.b/))", "*a ", "[", "`a ``", "![a](", "a\n", "1. a\n", "> a\n"]


def test_hostile_text_is_drawn_quickly(page):
    """In time linear in its length; a quadratic one would be minutes."""
    begin = time.monotonic()
    page.evaluate("all => all.forEach((s) => new MarkdownView().update(s.repeat(9000)))", HOSTILE)
    code = "name => highlight('a:\"\\\\{'.repeat(9000), name)"
    page.evaluate(f"() => ['css', 'html', 'python'].forEach({code})")
    assert time.monotonic() - begin < 20


def test_keyboard(page, stub):
    page.locator("body").click(position={"x": 700, "y": 120})
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("a / b")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    assert contents(stub.bodies[0]) == [("user", "a / b")]
    page.keyboard.press("Control+,")
    assert page.get_by_role("dialog", name="Settings").is_visible()
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0.6 (default)"
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "message"
    assert page.locator("[data-role]").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_names(scheme, page, stub):
    """Every text has a contrast of 4.5:1 with its background, every control a name."""
    page.emulate_media(color_scheme=scheme)
    stub.replies = [Reply(MARKDOWN, reasoning="Let me see.")]
    ask(page, "go")
    assert page.evaluate(CONTRAST_SCRIPT) == []
    unnamed = page.locator("button, input, textarea, select").evaluate_all(
        "all => all.filter((e) => !(e.ariaLabel || e.innerText.trim() || e.labels?.length)"
        " && !e.closest('dialog')).map((e) => e.outerHTML)"
    )
    assert unnamed == []


CONTRAST_SCRIPT = r"""() => {
  const parse = (color) => color.match(/[\d.]+/g).map(Number);
  const linear = (value) => (value / 255 + 0.055) ** 2.4 / 1.055 ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const background = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.checkVisibility()) continue;
    const levels = [luminance(parse(getComputedStyle(node).color)), luminance(background(node))];
    const ratio = (Math.max(...levels) + 0.05) / (Math.min(...levels) + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${node.className} ${texts.currentNode.data}`);
  }
  return low;
}"""


def test_narrow_window_without_horizontal_scrolling(page, stub):
    page.set_viewport_size({"width": 320, "height": 600})
    wide = f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n{MARKDOWN}"
    stub.replies = [Reply(wide, part=100)]
    ask(page, "z" * 300)
    widths = "[document.documentElement.scrollWidth, document.getElementById('scroll').scrollWidth]"
    assert max(page.evaluate(widths)) <= 320
    page.get_by_role("button", name="Show the conversations").click()
    page.get_by_role("navigation").get_by_role("button").first.click()
    page.get_by_role("button", name="Close the list").wait_for(state="hidden")
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
