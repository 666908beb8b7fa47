"""lm-eval over `LLM`: responses and scores equal those of lm-eval's own `hf` model."""

import pytest

from maxtext.common.errors import ConfigError, UserError
from tests.inference.evaluation.conftest import LENGTH, TASKS


@pytest.fixture(scope="module")
def lm(bpe_llm, lm_eval_offline):
    from maxtext.inference.evaluation.lm_eval_model import MaxTextLM

    return MaxTextLM(bpe_llm)


@pytest.fixture(scope="module")
def run(lm_eval_offline, task_folder):
    from lm_eval.evaluator import evaluate

    from maxtext.inference.evaluation.tasks import load_tasks, quiet

    def run(lm, names, **options):
        loaded = load_tasks(names, str(task_folder), None)
        with quiet():
            return evaluate(lm=lm, task_dict=loaded, bootstrap_iters=0, **options)

    return run


@pytest.fixture(scope="module")
def hf_results(hf_lm, run):
    return run(hf_lm, list(TASKS))


@pytest.fixture(scope="module")
def results(lm, run):
    return run(lm, list(TASKS))


def responses(results, task):
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [(sample["arguments"], sample["resps"]) for sample in samples]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["choice", "few_shot", "last_word"])
def test_loglikelihoods_equal_those_of_the_hf_model(results, hf_results, task):
    hf = responses(hf_results, task)
    for (arguments, values), (hf_arguments, hf_values) in zip(
        responses(results, task), hf, strict=True
    ):
        assert arguments == hf_arguments
        for [(logprob, is_greedy)], [(hf_logprob, hf_is_greedy)] in zip(
            values, hf_values, strict=True
        ):
            assert logprob == pytest.approx(hf_logprob, abs=2e-3)
            assert is_greedy == hf_is_greedy


def test_rolling_loglikelihoods_equal_those_of_the_hf_model(results, hf_results):
    values = [value for _, [[value]] in responses(results, "rolling")]
    hf_values = [value for _, [[value]] in responses(hf_results, "rolling")]
    assert values == pytest.approx(hf_values, rel=1e-5, abs=2e-3)


def test_generated_texts_equal_those_of_the_hf_model(results, hf_results):
    texts = [text for _, [[text]] in responses(results, "write")]
    assert texts == [text for _, [[text]] in responses(hf_results, "write")]
    assert any(texts)
    assert not any("e" in text for text in texts)


def test_scores_equal_those_of_the_hf_model(results, hf_results):
    for task in TASKS:
        hf_scores = hf_results["results"][task]
        assert any("," in name for name in hf_scores)
        for name, value in hf_scores.items():
            expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
            assert results["results"][task][name] == expected


@pytest.mark.slow
def test_chats_equal_those_of_the_hf_model(lm, hf_lm, run):
    options = {"apply_chat_template": True, "fewshot_as_multiturn": True}
    hf = run(hf_lm, ["few_shot", "write"], **options)
    native = run(lm, ["few_shot", "write"], **options)
    assert responses(native, "write") == responses(hf, "write")
    assert responses(native, "write")[0][0][0][0].startswith("<|im_start|>user\nSay fox.")
    for (arguments, _), (hf_arguments, _) in zip(
        responses(native, "few_shot"), responses(hf, "few_shot"), strict=True
    ):
        assert arguments == hf_arguments
    assert native["results"]["few_shot"] == hf["results"]["few_shot"]


def test_a_message_to_continue_ends_with_its_content(lm, hf_lm):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is "}]
    text = lm.apply_chat_template(chat, add_generation_prompt=False)
    assert text == hf_lm.apply_chat_template(chat, add_generation_prompt=False)
    assert text.endswith("The answer is ")


def test_system_messages_are_left_out_if_the_template_refuses_them(bpe_llm, lm_eval_offline):
    from maxtext.inference.evaluation.lm_eval_model import MaxTextLM
    from maxtext.tokenizers import ChatTemplate

    lm = MaxTextLM(bpe_llm)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    lm.template = ChatTemplate(f"{refusal}{{{{ messages[0].content }}}}", "a test")
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(chat) == "hi"
    with pytest.raises(UserError, match="refuses"):
        lm.apply_chat_template([])


def test_context_without_tokens_is_the_prefix_token(lm, monkeypatch):
    from lm_eval.api.instance import Instance

    target = lm.tok_encode(" fox", add_special_tokens=False)
    requests = [(None, context, target) for context in ([], [lm.prefix_token_id])]
    assert len(set(lm._loglikelihood_tokens(requests))) == 1
    texts = []
    for token_ids in ([], [lm.prefix_token_id]):
        monkeypatch.setattr(lm, "tok_encode", lambda text, ids=token_ids: ids)
        instance = Instance("generate_until", {}, ("", {"until": [], "max_gen_toks": 4}), 0)
        texts += lm.generate_until([instance])
    assert texts[0] == texts[1] != ""


def test_it_is_registered(lm, lm_eval_offline):
    from lm_eval.api.registry import get_model

    assert get_model("maxtext") is type(lm)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"temperature": 0, "max_new_tokens": 64}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0}),
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
        ({"until": "a", "num_beams": 1}, {"stop": ("a",)}),
        ({"until": ["a", "", "b" * 2000]}, {"stop": ("a",)}),
    ],
)
def test_generation_arguments(lm, arguments, expected):
    params, _ = lm.sampling_params({"max_gen_toks": 64} | arguments, 0)
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_gen_toks": 8, "num_beams": 4}, "num_beams=4"),
        ({"max_gen_toks": LENGTH}, f"max_target_length={LENGTH}"),
        ({}, "generates 256 tokens"),
    ],
)
def test_generation_arguments_that_are_not_supported(lm, arguments, reason):
    with pytest.raises(UserError, match=reason):
        lm.sampling_params(arguments, 0)


def test_contexts_that_are_too_long_are_counted(lm, run):
    before = lm.num_truncated
    run(lm, ["last_word"])
    assert lm.num_truncated == before + 1


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("broken", "task: broken\ndataset_path: json\ndataset_kwargs: {data_files: no.jsonl}\n"
         "test_split: test\noutput_type: loglikelihood\n", "tasks broken cannot be loaded"),
        ("other", "task: another\n", "did you mean another"),
    ],
)  # fmt: skip
def test_tasks_that_cannot_be_loaded(
    lm_eval_offline, tmp_path, monkeypatch, name, settings, reason
):
    from maxtext.inference.evaluation import tasks

    (tmp_path / "task.yaml").write_text(settings)
    real = tasks.TaskManager
    monkeypatch.setattr(  # lm-eval's own tasks take long to read
        tasks, "TaskManager", lambda **options: real(**options | {"include_defaults": False})
    )
    with pytest.raises(UserError, match=reason):
        tasks.load_tasks([name], str(tmp_path), None)


def test_a_folder_of_tasks_that_does_not_exist(lm_eval_offline, tmp_path):
    from maxtext.inference.evaluation.tasks import load_tasks

    with pytest.raises(ConfigError, match="is not a folder"):
        load_tasks(["a"], str(tmp_path / "none"), None)


@pytest.mark.slow
def test_the_server_gives_the_same_loglikelihoods(bpe_llm, bpe_folder, results, run, monkeypatch):
    pytest.importorskip("tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from tests.inference.server.local_server import KEY, run_server

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with run_server(bpe_llm, slots=4, length=LENGTH, api_keys=[KEY]) as (_, url):
        client = LocalCompletionsAPI(
            model="tiny",
            base_url=f"{url}/v1/completions",
            tokenizer=str(bpe_folder),
            tokenizer_backend="huggingface",
            num_concurrent=2,
            add_bos_token=True,  # of the vocabulary, as the hf model does
            max_retries=1,
            max_length=LENGTH,
        )
        served = run(client, ["choice"])
    for (_, values), (_, expected) in zip(
        responses(served, "choice"), responses(results, "choice"), strict=True
    ):
        for [(logprob, is_greedy)], [(direct, direct_is_greedy)] in zip(
            values, expected, strict=True
        ):
            assert logprob == pytest.approx(direct, abs=2e-3)
            assert is_greedy == direct_is_greedy
