"""Whole runs with tools and environments: what is sampled is trained on, with the right ratio."""

import json

import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.tokenizers import open_tokenizer
from maxtext.trainers import tune
from maxtext.trainers.methods.rl.agents.environment import prompt_messages
from tests.support.conversations import TEMPLATE, add
from tests.support.distillation import save_llama
from tests.support.grpo import RUN, rollouts_of, share_of_low_bytes
from tests.tokenizers.tiny import write_bpe

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]
LENGTH = 192


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder, layers=1, embed_dim=16, seed=0, vocab_size=400)
    write_bpe(folder, vocab_size=400, chat_template=TEMPLATE)
    return folder


def train(base, tmp_path, **keys):
    settings = RUN | dict(
        tokenizer_path=str(base),
        max_prefill_predict_length=16,
        max_target_length=LENGTH,
        base_output_directory=str(tmp_path),
        run_name="run",
        enable_checkpointing=False,
        steps=1,
        grpo_beta=0.0,
        learning_rate=0.01,
    )
    return tune.grpo(base, ROWS, **settings | keys)


class Echo:
    """Answers a turn with its length, for two turns."""

    instances: list = []

    def __init__(self):
        self.instances.append(self)
        self.texts = []

    def reset(self, row):
        return prompt_messages(row["prompt"])

    def step(self, text):
        self.texts.append(text)
        reply = [{"role": "user", "content": str(len(text))}]
        return reply, len(text) / 100, len(self.texts) == 2


@pytest.mark.slow
def test_environment_run(base, tmp_path, light_compiler):
    Echo.instances.clear()
    # A turn is short, so that two fit: every token may end it.
    run = train(
        base,
        tmp_path,
        environment=Echo,
        rewards=[share_of_low_bytes],
        stop_strings=["a", "e", "i", "o", "u", " "],
        max_concurrency=3,
        system_prompt="Count.",
    )
    (metrics,) = run.metrics
    assert len(Echo.instances) == 8
    assert metrics["sampling/logp_difference_max"] < 1e-4
    assert 1 < metrics["conversations/mean_turns"] <= 2
    rollouts = rollouts_of(run)
    tokenizer = open_tokenizer(str(base))
    prompt = tokenizer.encode_with_specials(
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n0+0=<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rollouts[0]["prompt_ids"] == prompt
    for rollout, echo in zip(rollouts, Echo.instances, strict=True):
        assert rollout["completion"] == "\n".join(echo.texts)
        points = sum(len(text) for text in echo.texts) / 100
        assert rollout["rewards"]["environment"] == pytest.approx(points)
        total = sum(rollout["rewards"].values())
        assert rollout["reward"] == pytest.approx(total, rel=1e-5)
        assert len(rollout["log_probs"]) == sum(rollout["trained_on"])
    lengths = [sum(rollout["trained_on"]) for rollout in rollouts]
    assert metrics["completions/mean_length"] == pytest.approx(np.mean(lengths))


@pytest.mark.slow
def test_agentic_rollouts_without_tools_are_the_plain_ones(base, tmp_path, light_compiler):
    runs = [
        train(base, tmp_path, run_name=str(agentic), use_agentic_rollout=agentic, steps=2,
              rewards=[share_of_low_bytes], max_target_length=40)
        for agentic in (False, True)
    ]  # fmt: skip
    plain, agentic = map(rollouts_of, runs)
    for one, two in zip(plain, agentic, strict=True):
        assert two.pop("trained_on") == [True] * len(two["token_ids"])
        assert one.pop("trained_on") is None
        assert one == two
    assert [row["loss"] for row in runs[0].metrics] == [row["loss"] for row in runs[1].metrics]


def test_rewards_of_a_run_with_an_environment(base):
    from maxtext.trainers.methods.rl.agents.agent import Agent
    from maxtext.trainers.methods.rl.rewards.functions import build_rewards, reward_functions

    class Config:
        reward_functions_path = ""
        reward_weights = None
        reward_model_path = ""

    environment = Agent.from_python((), Echo).rewards
    functions = reward_functions([share_of_low_bytes])
    names = [each.name for each in build_rewards(Config, functions, environment)]
    assert names == ["environment", "share_of_low_bytes"]
    # The built-in rewards compare with answers, which the rows of an environment need not have.
    assert [each.name for each in build_rewards(Config, (), environment)] == ["environment"]


def test_refused_agents(base, tmp_path):
    with pytest.raises(ConfigError, match="exclude each other"):
        train(base, tmp_path, tools=[add], environment=Echo)
    with pytest.raises(ConfigError, match="need use_agentic_rollout=true"):
        train(base, tmp_path, tools=[add], use_agentic_rollout=False)
    with pytest.raises(ConfigError, match="system_prompt=Hi .* needs use_agentic_rollout=true"):
        train(base, tmp_path, system_prompt="Hi")
    with pytest.raises(ConfigError, match="two tools have the name"):
        train(base, tmp_path, tools=[add, add])
    with pytest.raises(ConfigError, match="tools must be a list of functions, not <function add"):
        train(base, tmp_path, tools=add)
    with pytest.raises(ConfigError, match="environment must be a class, .* of type Echo"):
        train(base, tmp_path, environment=Echo())


def test_tools_need_a_template_with_calls(base, tmp_path, light_compiler):
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(ConfigError, match="no form of tool calls"):
        train(base, tmp_path, tools=[add], chat_template_path=str(template))


def test_schema_of_a_log_line(base):
    """A line of a run of an earlier version has `learned`, or neither."""
    from maxtext.trainers.methods.rl.rollout_log import rollout_from_json, rollout_to_json

    line = {
        "step": 0, "prompt": "a", "completion": "b", "finish_reason": "end", "rewards": {},
        "reward": 1.0, "advantage": 0.0, "prompt_ids": [1], "token_ids": [2], "log_probs": [-1.0],
        "old_logps": [],
    }  # fmt: skip
    assert rollout_from_json(json.dumps(line)).trained_on is None
    for value, expected in ((None, None), ([True, False], (True, False))):
        rollout = rollout_from_json(json.dumps(line | {"learned": value}))
        assert rollout.trained_on == expected
        assert rollout_from_json(rollout_to_json(rollout)) == rollout
