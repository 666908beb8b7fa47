"""Evaluation by sampling: grades of scripted responses against closed forms, and whole runs."""

import json
from math import comb

import numpy as np
import pytest

from maxtext.cli.main import main
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.derive import Devices
from maxtext.configs.sources import HERE, from_python
from maxtext.inference import LLM
from maxtext.inference.requests import Completion, GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.models.configuration import load
from maxtext.tokenizers import open_tokenizer
from maxtext.trainers import tune
from maxtext.trainers.methods.rl import response_evaluation
from maxtext.trainers.methods.rl.group_sampler import Prompt
from maxtext.trainers.methods.rl.response_evaluation import (
    ProblemResult,
    ResponseEvaluation,
    Responses,
    evaluate_llm_responses,
    evaluate_responses,
    write_responses,
)
from maxtext.trainers.methods.rl.rewards.functions import builtin_rewards, reward_functions
from maxtext.trainers.methods.rl.rollout import sample_seed
from tests.support.distillation import save_llama
from tests.support.grpo import BYTES, RUN, share_of_low_bytes
from tests.tokenizers.tiny import write_bpe

TEMPLATE = "<reasoning>r</reasoning><answer>{}</answer>"
PROBLEMS = [
    Prompt([1, 2, 3], {"prompt": "6*7=", "answer": "42"}),
    Prompt([1, 2], {"prompt": "2+2=", "answer": "4"}),
]
# Of the first problem two of four are right and one is near; the second has a majority that is
# wrong.
RESPONSES = [
    *(TEMPLATE.format(text) for text in ("42", "42.0", "40", "7")),
    *(TEMPLATE.format(text) for text in ("5", "5", "4", "9")),
]


def configure(**keys):
    overrides = {"num_eval_passes": 4, "max_target_length": 300, **keys}
    return load(HERE / "evaluate.yml", from_python(overrides), environ={}, devices=Devices(1))


class ScriptedSampler:
    def __init__(self, responses):
        self.responses = responses
        self.requests = []
        self.batches = []

    def __call__(self, problems, requests):
        start = sum(self.batches)
        self.batches.append(len(requests))
        self.requests += requests
        return Responses(self.responses[start : start + len(requests)])


def run(**keys):
    config = configure(**keys)
    return evaluate_responses(config, PROBLEMS, ScriptedSampler(RESPONSES), builtin_rewards(config))


def test_metrics_are_those_of_the_responses():
    metrics = run().metrics
    assert metrics["accuracy"] == 1.0  # each problem has a right response
    assert metrics["partial_accuracy"] == metrics["format"] == 1.0
    for k in (1, 2, 4):
        expected = np.mean([1 - comb(4 - right, k) / comb(4, k) for right in (2, 1)])
        assert metrics[f"pass_at_{k}"] == pytest.approx(expected)
    assert "pass_at_3" not in metrics
    format_points = 3.0 + 4 * 0.5
    answer_points = [5.0, 5.0, 0.5, -1.0, -1.0, -1.0, 5.0, -1.0]  # 40 is within 10 % of 42
    assert metrics["reward"] == pytest.approx(format_points + np.mean(answer_points))


@pytest.mark.parametrize(("mode", "accuracy"), [("maj", 0.5), ("pass_at_1", 3 / 8)])
def test_modes(mode, accuracy):
    assert run(eval_mode=mode).metrics["accuracy"] == pytest.approx(accuracy)


def test_requests_have_the_sampling_of_the_strategy():
    keys = {"generation_configs": {"warm": {"eval_temperature": 1.5, "eval_top_k": 7}}}
    expected = {"warm": (1.5, 7, 0.95), "greedy": (0.01, 1, 1.0), "liberal": (0.85, 2000, 1.0)}
    for name, sampling in expected.items():
        config = configure(eval_sampling_strategy=name, **keys)
        sampler = ScriptedSampler(RESPONSES)
        evaluate_responses(config, PROBLEMS, sampler, builtin_rewards(config), stop_token_ids=(2,))
        assert len(sampler.requests) == 8
        for number, request in enumerate(sampler.requests):
            params = request.params
            assert (params.temperature, params.top_k, params.top_p) == sampling
            assert params.max_new_tokens == 300 - len(request.prompt)
            assert params.seed == sample_seed(0, 0, *divmod(number, 4))
            assert params.stop_token_ids == (2,)


def test_problems_are_sampled_by_batches():
    metrics = []
    for size, batches in ((-1, [8]), (1, [4, 4]), (5, [8])):
        config = configure(eval_batch_size=size, stop_strings=["</answer>"])
        sampler = ScriptedSampler(RESPONSES)
        metrics.append(
            evaluate_responses(config, PROBLEMS, sampler, builtin_rewards(config)).metrics
        )
        assert sampler.batches == batches
        assert {request.params.stop for request in sampler.requests} == {("</answer>",)}
    assert metrics[0] == metrics[1] == metrics[2]


def test_rewards_get_the_columns_of_sampling():
    def turns(prompts, completions, messages, **columns):
        return [len(each) for each in messages]

    def sample(problems, requests):
        return Responses(["x"] * len(requests), {"messages": [[1, 2]] * len(requests)})

    config = configure(eval_batch_size=1)
    evaluation = evaluate_responses(config, PROBLEMS, sample, reward_functions([turns]))
    assert evaluation.reward == 2.0


def test_wrong_or_right_problems_are_written(tmp_path):
    for right, question in ((True, "6*7="), (False, "2+2=")):
        config = configure(eval_make_lst=True, eval_corr_lst=right, eval_mode="maj")
        sampler = ScriptedSampler(RESPONSES)
        evaluation = evaluate_responses(config, PROBLEMS, sampler, builtin_rewards(config))
        (line,) = write_responses(config, evaluation, tmp_path / "new").read_text().splitlines()
        row = json.loads(line)
        assert row["question"] == question
        assert row["responses"] == RESPONSES[:4] if right else RESPONSES[4:]


def test_rows_need_answers():
    config = configure()
    with pytest.raises(UserError, match="no right answer in a column answer"):
        evaluate_responses(config, [Prompt([1], {"prompt": "x"})], ScriptedSampler([]), [])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eval_sampling_strategy": "beam"}, "use one of greedy, standard, liberal"),
        ({"generation_configs": {"a": {"temperature": 1}}}, "has 'temperature'"),
        ({"generation_configs": {"a": 3}}, "must map"),
        ({"generation_configs": {"a": {"eval_top_k": "x"}}}, "is not a number"),
        ({"generation_configs": {"greedy": {"eval_top_p": 2}}}, "above 0 and at most 1"),
        ({"generation_configs": {"greedy": {"eval_top_k": 1.5}}}, "a whole eval_top_k"),
        ({"generation_configs": {"greedy": {"eval_temperature": float("nan")}}}, "at least 0"),
        ({"math_verify_num_procs": 0}, "at least 1"),
        ({"math_verify_timeout": 0}, "at least 1"),
        ({"eval_corr_lst": True}, "it needs eval_make_lst=true"),
        ({"num_eval_passes": 0}, "at least 1"),
        ({"eval_batch_size": 0}, "at least 1, or -1"),
        ({"test_batch_start_index": 8, "num_test_batches": 1}, "where evaluation ends"),
        ({"eval_steps": 3, "eval_interval": 2}, "samples responses instead"),
        ({"num_test_batches": 0, "eval_interval": 2}, "raise it, or leave eval_interval out"),
        ({"use_grpo": False, "num_eval_passes": 2}, "needs use_grpo=true"),
    ],
)
def test_refused_configurations(keys, message):
    with pytest.raises(ConfigError, match=message):
        configure(**{"num_eval_passes": 1} | keys)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder, layers=1, embed_dim=16, seed=0, vocab_size=BYTES)
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_policy_is_evaluated_before_and_after_training(base, problems, tmp_path, light_compiler):
    tune.grpo(
        base,
        [{"prompt": "1+1=", "answer": "2"}] * 4,
        rewards=[share_of_low_bytes],
        **RUN,
        base_output_directory=str(tmp_path),
        run_name="run",
        enable_checkpointing=False,
        metrics_file=str(tmp_path / "metrics.jsonl"),
        steps=2,
        grain_eval_files=str(problems),
        num_test_batches=3,
        test_batch_start_index=1,
        num_eval_passes=2,
        eval_sampling_strategy="standard",
        eval_make_lst=True,
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [each for each in records if "eval_accuracy" in each]
    assert [each["step"] for each in evaluations] == [0, 1]
    assert all(each["eval_pass_at_2"] == each["eval_accuracy"] == 0.0 for each in evaluations)
    assert all(0 < each["eval_reward"] < 1 for each in evaluations)
    lines = (tmp_path / "run/evaluation.jsonl").read_text().splitlines()
    assert [json.loads(line)["question"] for line in lines] == [f"{i}+{i}=" for i in range(1, 6)]


class Completions:
    """A model that responds to each request with its stop string."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.requests = []

    def completions(self, requests, **limits):
        self.requests = requests
        token_ids = tuple(self.tokenizer.encode("<answer>42</answer>"))
        for index in range(len(requests)):
            yield Completion(index, token_ids, text="<answer>42", finish_reason="stop")


def test_command_grades_what_a_run_does(tmp_path):
    """Texts have their stop string, and prompts the system prompt."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}")
    config = configure(
        num_eval_passes=1,
        tokenizer_path="byte",
        stop_strings=["</answer>"],
        use_agentic_rollout=True,
        system_prompt="Add.",
        chat_template_path=str(template),
    )
    llm = Completions(open_tokenizer("byte"))
    evaluation = evaluate_llm_responses(config, llm, PROBLEMS, builtin_rewards(config))
    assert [problem.accuracy for problem in evaluation.problems] == [1.0, 0.0]
    prompts = [llm.tokenizer.decode(request.prompt) for request in llm.requests]
    assert prompts == ["s:Add.;u:6*7=;", "s:Add.;u:2+2=;"]
    assert llm.requests[0].params.max_new_tokens == 300 - len(llm.requests[0].prompt)


@pytest.mark.slow
def test_limits_of_the_engine(base):
    limits = dict(max_num_seqs=2, max_num_batched_tokens=4)
    keys = dict(use_grpo=True, dataset_type="hf", num_generations=2, tokenizer_path="byte")
    llm = LLM.load(base, **keys, **limits, max_prefill_predict_length=4, max_target_length=16)
    request = GenerationRequest([1, 2, 3], SamplingParams(max_new_tokens=4))
    assert len(list(llm.completions([request] * 5, spare_tokens=3))) == 5
    assert llm.engine.cache_config.slots == 2
    assert llm.engine.cache_config.length == 8 + 3  # the next power of two of 3 + 4, and 3 more
    assert llm.engine.scheduler.max_batched_tokens == 4


def problems_args(path, *args):
    data = ["dataset_type=grain", "grain_file_type=jsonl", f"grain_eval_files={path}"]
    return ["evaluate", *data, "max_prefill_predict_length=24", "max_target_length=64", *args]


@pytest.fixture
def asked(monkeypatch):
    """The prompts that `maxtext evaluate` samples responses to."""
    prompts = []

    def grade(config, llm, problems, rewards):
        prompts.extend(problems)
        result = ProblemResult("", (), ("",), right=0, accuracy=0, partial_accuracy=0, format=0)
        return ResponseEvaluation((result,), reward=0.0)

    monkeypatch.setattr(response_evaluation, "evaluate_llm_responses", grade)
    return prompts


def test_problems_are_tokenized_with_the_tokenizer_of_the_model_folder(tmp_path, asked):
    """The texts have more than 24 bytes, and at most 24 tokens of the folder's tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    save_llama(folder, layers=1, embed_dim=16, seed=0, vocab_size=400)
    write_bpe(folder)
    texts = ["The Quick Brown Fox Jumps Over", "Seven Wizards Brew Hot Tea And 12"]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": each, "answer": "1"}) + "\n" for each in texts))
    assert main(problems_args(path, f"load_parameters_path={folder}")) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert [each.ids for each in asked] == [tokenizer(text).input_ids for text in texts]


def test_problem_that_is_too_long_is_refused_instead_of_dropped(
    base, tmp_path, asked, capsys, caplog
):
    path = tmp_path / "problems.jsonl"
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 25, "answer": "3"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = problems_args(path, f"load_parameters_path={base}", "tokenizer_path=byte")
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "line 2: its prompt has 26 tokens" in error
    assert "max_prefill_predict_length=24" in error
    assert not asked
    assert main([*args, "max_bad_records=1"]) == 0  # dropped by choice, with a warning
    assert len(asked) == 1
    assert "its prompt has 26 tokens" in caplog.text


@pytest.mark.slow
def test_command(base, problems, tmp_path, capsys, light_compiler):
    args = [
        "evaluate", f"load_parameters_path={base}", "tokenizer_path=byte", "dataset_type=grain",
        "grain_file_type=jsonl", "max_prefill_predict_length=8", "max_target_length=14",
        "dtype=float32", "attention=dot_product", f"base_output_directory={tmp_path}",
        "run_name=run",
    ]  # fmt: skip
    assert main([*args, f"grain_eval_files={problems}", "eval_make_lst=true", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["problems"] == 7
    assert output["accuracy"] == output["pass_at_1"] == 0.0
    assert output["reward"] == pytest.approx(4 * -0.5 - 0.5)  # neither tokens nor an answer
    assert len((tmp_path / "run/evaluation.jsonl").read_text().splitlines()) == 7
    assert main(args) == 2
    assert "nothing to evaluate on: set grain_eval_files" in capsys.readouterr().err
