"""Words that a completion may not have, against transformers' `bad_words_ids`."""

import pytest

from maxtext.inference import GenerationRequest, SamplingParams
from maxtext.inference.sampling.bad_words import BadWordsMatcher, tokenize_bad_words
from maxtext.inference.validation import RequestError
from maxtext.tokenizers import open_tokenizer
from tests.tokenizers.tiny import write_bpe

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("few_programs")
COUNT = 12


def hf_greedy(model, prompt, bad_ids=None, allowed_ids=None):
    """Greedy tokens of transformers, whose processor looks at the prompt, too."""
    options = {} if bad_ids is None else {"bad_words_ids": bad_ids}
    if allowed_ids is not None:
        options["prefix_allowed_tokens_fn"] = lambda batch, ids: list(allowed_ids)
    output = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=COUNT, pad_token_id=1, **options
    )
    return output[0, len(prompt) :].tolist()


def complete(llm, prompts, options):
    """The tokens of completions that share batches."""
    requests = [
        GenerationRequest(prompt, SamplingParams(max_new_tokens=COUNT, **each))
        for prompt, each in zip(prompts, options, strict=True)
    ]
    completions = sorted(llm.completions(iter(requests)), key=lambda each: each.index)
    return [list(each.token_ids) for each in completions]


def text_of(tokens):
    return " ".join(f"w{token}" for token in tokens)


def test_completions_without_bad_words_equal_those_of_transformers(llm, model, ids):
    """Words of one and of several tokens, which the model would write."""
    prompt = ids[0].tolist()
    free = hf_greedy(model, prompt)
    cases = [
        [free[:1]],
        [free[2:4]],
        [free[1:4], free[3:5]],
        [free[4:5], free[5:7], [*free[:2], free[9]]],
    ]
    options = [{}, *({"bad_words": tuple(map(text_of, case))} for case in cases)]
    expected = [free, *(hf_greedy(model, prompt, case) for case in cases)]
    assert complete(llm, [prompt] * len(options), options) == expected
    assert all(tokens != free for tokens in expected[1:])


def test_words_of_the_prompt_do_not_begin_a_bad_word(llm, model, ids):
    """As in vLLM: the last token of the prompt and the first of the completion are no bad word."""
    prompt = ids[0].tolist()
    free = hf_greedy(model, prompt)
    assert complete(llm, [prompt], [{"bad_words": text_of([prompt[-1], free[0]])}]) == [free]


def test_bad_words_together_with_allowed_tokens(llm, model, ids):
    prompt, allowed = ids[1].tolist(), list(range(1, 61, 2))
    free = hf_greedy(model, prompt, allowed_ids=allowed)
    bad = [free[:1], free[2:4]]
    options = {"allowed_token_ids": allowed, "bad_words": tuple(map(text_of, bad))}
    (tokens,) = complete(llm, [prompt], [options])
    assert tokens == hf_greedy(model, prompt, bad, allowed)
    assert tokens != free


def test_constraints_that_leave_no_token_are_an_error(llm, ids):
    params = SamplingParams(allowed_token_ids=[7], bad_words="w7", max_new_tokens=4)
    (completion,) = llm.completions(iter([GenerationRequest(ids[0].tolist(), params)]))
    assert completion.finish_reason == "error"
    assert "no token may follow" in completion.error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [-1]}, "list of token ids"),
        ({"allowed_token_ids": [99]}, "outside the vocabulary"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "only tokens that end"),
        ({"bad_words": [""]}, "none of them empty"),
        ({"bad_words": 5}, "list of texts"),
    ],
)
def test_wrong_value_names_its_field(llm, options, reason):
    def prepare():
        params = SamplingParams(max_new_tokens=4, **options)
        llm.prepare(llm.engine_for(1, 16), GenerationRequest("w5", params))

    with pytest.raises(RequestError, match=reason) as caught:
        prepare()
    assert caught.value.param in options


def test_words_are_bad_with_and_without_a_space_before_them(tmp_path):
    tokenizer = open_tokenizer(str(write_bpe(tmp_path)))
    (word,) = tokenizer.encode("a")
    assert set(tokenize_bad_words([" a"], tokenizer)) >= {(word,)}
    for bad, spaced in (("the", " the"), ("a", " a")):
        expected = {tuple(tokenizer.encode(bad))}
        if len(tokenizer.encode(spaced)) == len(tokenizer.encode(bad)):
            expected.add(tuple(tokenizer.encode(spaced)))
        assert set(tokenize_bad_words([bad], tokenizer)) == expected


def test_matcher_accepts_tokens_up_to_the_last_of_a_bad_word():
    matcher = BadWordsMatcher([(1, 2, 3), (5,)], vocab_size=40)
    assert matcher.accept([1, 2]) == 2
    copied = matcher.copy()
    assert copied.by_last is matcher.by_last  # of all choices of a request
    assert matcher.excluded_ids() == [3, 5]
    assert matcher.accept([3]) == 0
    assert matcher.accept([4, 3, 1, 2, 3, 9]) == 4
    assert copied.accept([1, 1, 2, 5]) == 3
