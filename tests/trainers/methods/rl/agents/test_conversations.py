"""Conversations with scripted turns: tokens, masks, limits and tools. No model is needed."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.tokenizers import ChatTemplate, open_tokenizer
from maxtext.trainers.methods.rl.agents.agent import create_environment
from maxtext.trainers.methods.rl.agents.conversations import ConversationRunner
from maxtext.trainers.methods.rl.agents.environment import SingleTurn
from maxtext.trainers.methods.rl.agents.tools import (
    CallFormat,
    ToolCall,
    ToolEnvironment,
    Tools,
    parse_calls,
)
from maxtext.trainers.methods.rl.agents.turn_tokens import TurnTokens
from tests.support.conversations import ADD, TEMPLATE, ScriptedSampler, add, conversation, spell
from tests.tokenizers.tiny import write_bpe

HERMES = CallFormat("hermes", "think")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_bpe(tmp_path_factory.mktemp("tokenizer") / "bpe", chat_template=TEMPLATE)
    return open_tokenizer(str(folder))


def runner(tokenizer, tools=(), **limits):
    template = ChatTemplate(TEMPLATE, "test", tokenizer.special_tokens)
    tokens = TurnTokens(template, tokenizer, tools)
    limits = {"length": 2000, "max_turns": 8, "max_concurrency": 256, **limits}
    return ConversationRunner(tokens, **limits)


def test_tokens_are_sampled_or_those_of_the_template(tokenizer):
    tools = Tools([add])
    run = runner(tokenizer, tools.schemas)
    sampler = ScriptedSampler(tokenizer, {0: [ADD, "It is 5."]})
    (rollout,) = run.run(sampler, [conversation(0, ToolEnvironment(tools, HERMES))])
    messages = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": ADD},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    text = run.tokens.template.render(messages, variables={"tools": tools.schemas})
    every_id = (*rollout.prompt_ids, *rollout.token_ids)
    inner = tokenizer.inner
    assert inner.decode(every_id, skip_special_tokens=False) + "\n" == text
    pairs = list(zip(rollout.token_ids, rollout.trained_on, strict=True))
    trained_on = [token for token, mask in pairs if mask]
    assert trained_on == [*spell(tokenizer, ADD), 4, *spell(tokenizer, "It is 5."), 4]
    context = [token for token, mask in pairs if not mask]
    reply = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    assert context == tokenizer.encode_with_specials(reply + "<|im_start|>assistant\n")
    assert rollout.sampled_ids == tuple(trained_on)
    first = len(spell(tokenizer, ADD)) + 1
    assert len(rollout.log_probs) == len(trained_on)
    assert rollout.log_probs[0] == rollout.log_probs[first] == -0.25
    assert rollout.turns == (ADD, "It is 5.")
    assert [message["role"] for message in rollout.messages] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert rollout.finish_reason == "end"
    # The second turn continues the very tokens of the first, with its seed.
    (_, one), (_, two) = sampler.requests
    assert two.prompt[: len(one.prompt) + first] == (*one.prompt, *trained_on[:first])
    assert one.params.seed == two.params.seed
    for request in (one, two):
        assert len(request.prompt) + request.params.max_new_tokens == 2000


def test_rows_train_on_the_turns_of_the_model_alone(tokenizer):
    tools = Tools([add])
    sampler = ScriptedSampler(tokenizer, {0: [ADD, "5"]})
    run = runner(tokenizer, tools.schemas)
    (rollout,) = run.run(sampler, [conversation(0, ToolEnvironment(tools, HERMES))])
    row = rollout.row(2000)
    trained_on = row["targets"][row["targets_segmentation"] != 0]
    assert trained_on.tolist() == list(rollout.sampled_ids)
    assert (row["inputs_segmentation"] != 0).sum() == (
        len(rollout.prompt_ids) + len(rollout.token_ids) - 1
    )


def test_conversations_end_by_turns_and_length(tokenizer):
    tools = Tools([add])
    turns = {0: [ADD] * 3, 1: ["no call"], 2: [ADD, "cut…"], 3: [ADD, "x"]}
    run = runner(tokenizer, tools.schemas, max_turns=3)
    conversations = [conversation(index, ToolEnvironment(tools, HERMES)) for index in turns]
    rollouts = run.run(ScriptedSampler(tokenizer, turns), conversations)
    assert [rollout.finish_reason for rollout in rollouts] == ["turns", "end", "length", "end"]
    assert [len(rollout.turns) for rollout in rollouts] == [3, 1, 2, 2]
    # A reply that leaves no token for the model is left out.
    used = len(rollouts[3].prompt_ids) + len(spell(tokenizer, ADD)) + 1
    run = runner(tokenizer, tools.schemas, length=used + 10)
    sampler = ScriptedSampler(tokenizer, {3: [ADD]})
    (cut,) = run.run(sampler, [conversation(3, ToolEnvironment(tools, HERMES))])
    assert cut.finish_reason == "length"
    assert all(cut.trained_on)


def test_turn_that_a_stop_text_ended_gets_its_end_token_from_the_template(tokenizer):
    class Twice(SingleTurn):
        count = 0

        def step(self, text):
            self.count += 1
            return [{"role": "user", "content": "go on"}], 0.5, self.count == 2

    sampler = ScriptedSampler(tokenizer, {0: ["a STOP", "b"]})
    (rollout,) = runner(tokenizer).run(sampler, [conversation(0, Twice())])
    end = rollout.trained_on.index(False)
    assert rollout.token_ids[end] == 4
    assert rollout.environment_reward == 1.0


def test_open_conversations_are_limited(tokenizer):
    turns = {index: ["x"] for index in range(7)}
    sampler = ScriptedSampler(tokenizer, turns)
    conversations = [conversation(index, SingleTurn()) for index in turns]
    rollouts = runner(tokenizer, max_concurrency=3).run(sampler, conversations)
    assert sampler.max_open == 3
    assert [rollout.turns for rollout in rollouts] == [("x",)] * 7
    assert all(rollout.environment_reward is None for rollout in rollouts)


def test_system_prompt_begins_conversations_without_one(tokenizer):
    run = runner(tokenizer, system_prompt="Be brief.")
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Why?"}]
    conversations = [conversation(0, SingleTurn(), "Why?"), conversation(1, SingleTurn(), own)]
    rollouts = run.run(ScriptedSampler(tokenizer, {0: ["x"], 1: ["y"]}), conversations)
    for rollout, text in zip(rollouts, ("Be brief.", "Be long."), strict=True):
        expected = f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        expected += "<|im_start|>assistant\n"
        assert rollout.prompt_ids == tuple(tokenizer.encode_with_specials(expected))


def test_failing_environment_names_its_row(tokenizer):
    class Broken(SingleTurn):
        def __init__(self, error):
            self.error = error

        def step(self, text):
            raise self.error

    for error in (RuntimeError("no socket"), SystemExit("no licence")):
        sampler = ScriptedSampler(tokenizer, {4: ["x"]})
        message = f"Broken failed for row 4: {type(error).__name__}: {error}"
        with pytest.raises(UserError, match=message):
            runner(tokenizer).run(sampler, [conversation(4, Broken(error))])


def test_environment_that_cannot_be_created():
    class Unready(SingleTurn):
        def __init__(self):
            raise OSError("no socket")

    with pytest.raises(UserError, match="Unready cannot be created: OSError: no socket"):
        create_environment(Unready)


def test_environments_have_rows_of_their_own(tokenizer):
    """All conversations of a group belong to one row."""

    class Taking(SingleTurn):
        def reset(self, row):
            return [{"role": "user", "content": row.pop("prompt")}]

    row = {"prompt": "2+3?"}
    conversations = [replace(conversation(index, Taking()), row=row) for index in range(2)]
    sampler = ScriptedSampler(tokenizer, {0: ["x"], 1: ["y"]})
    first, second = runner(tokenizer).run(sampler, conversations)
    assert first.prompt_ids == second.prompt_ids
    assert row == {"prompt": "2+3?"}


USER = [{"role": "user", "content": "2+3?"}]


@pytest.mark.parametrize(
    ("start", "result", "message"),
    [
        ("2+3?", None, "row 0: reset returned str instead of a list of messages"),
        ([], None, "row 0: reset returned no message"),
        (["2+3?"], None, "row 0: reset returned the message '2.3.', which has no role"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            None,
            "row 0: reset returned messages that are no text: message 0 has a part of type 'image'",
        ),
        (USER, 3, "row 0: step returned something else than"),
        (USER, ([], "a", True), "row 0: step returned the reward 'a', which is no number"),
        (USER, ([], float("nan"), True), "row 0: step returned the reward nan"),
        (USER, ([{"role": "user"}], 1.0, False), "row 0: step returned the message .* no content"),
    ],
)
def test_environment_that_returns_something_else(tokenizer, start, result, message):
    class Odd:
        def reset(self, row):
            return start

        def step(self, text):
            return result

    sampler = ScriptedSampler(tokenizer, {0: ["x"]})
    with pytest.raises(UserError, match=f"the environment Odd failed for {message}"):
        runner(tokenizer).run(sampler, [conversation(0, Odd())])


def test_prompt_that_leaves_no_token(tokenizer):
    run = runner(tokenizer, length=4)
    with pytest.raises(UserError, match="leaves none for the model"):
        run.run(ScriptedSampler(tokenizer, {}), [conversation(0, SingleTurn())])


def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def test_results_of_calls():
    tools = Tools([add, divide, wait], timeout=0.5)
    calls = [
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("divide", {"a": 1, "b": 0}),
        ToolCall("subtract", {}),
        ToolCall("add", {"a": 1}),
        ToolCall("wait", {"seconds": 0.01}),
        ToolCall("wait", {"seconds": 30}),
    ]
    assert tools.run(calls) == [
        "3",
        "Error: ZeroDivisionError: division by zero",
        "Error: there is no tool 'subtract'; there are add, divide, wait",
        "Error: add: missing a required argument: 'b'",
        "done",
        "Error: no result within 0.5 seconds",
    ]


def test_calls_of_a_turn_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=10)

    def meet(name: str) -> str:
        """Wait for the others."""
        barrier.wait()
        return name

    started = time.monotonic()
    assert Tools([meet]).run([ToolCall("meet", {"name": name}) for name in "abc"]) == list("abc")
    assert time.monotonic() - started < 10


def test_calls_that_hang_have_one_deadline():
    started = time.monotonic()
    results = Tools([wait], timeout=0.3).run([ToolCall("wait", {"seconds": 30})] * 20)
    assert set(results) == {"Error: no result within 0.3 seconds"}
    assert time.monotonic() - started < 20 * 0.3


def test_two_tools_of_one_name():
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        Tools([add, add])


def test_what_is_no_call():
    assert parse_calls("plain", "hermes", {}) == []
    call = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
    for arguments in ('{"a": 1 2}', "[1]", "3", '{"a": }', "[" * 9999):
        assert parse_calls(call % arguments, "hermes", {}) == []
    assert parse_calls("<tool_call>{oops}</tool_call>", "hermes", {}) == []
    mixed = f"{call % '{oops}'}{ADD}"
    assert parse_calls(mixed, "hermes", {}) == [ToolCall("add", {"a": 2, "b": 3})]


HARMONY = (
    "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}<|call|>'
)


@pytest.mark.parametrize(
    ("parser", "text", "count"),
    [
        ("hermes", f"first {ADD}\n{ADD}", 2),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}', 1),
        ("harmony", HARMONY, 1),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}}]', 1),
    ],
)
def test_calls_of_each_family(parser, text, count):
    assert parse_calls(text, parser, {}) == [ToolCall("add", {"a": 2, "b": 3})] * count
