"""Log-probabilities of completions and prompts, against transformers."""

import numpy as np
import pytest

from maxtext import LLM
from maxtext.inference import GenerationRequest, SamplingParams

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("few_programs")
EXACT = {"dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest"}
PAGED = {"attention": "paged", "pagedattn_tokens_per_page": 4, "pagedattn_num_pages": 40}
LAYOUTS = {
    "contiguous": {},
    "chunks and prefixes": {
        **PAGED,
        "enable_prefix_caching": True,
        "use_chunked_prefill": True,
        "prefill_chunk_size": 5,
        "max_target_length": 64,
        "per_device_batch_size": 3,
    },
}


def hf_logprobs(model, ids):
    """[S, V], of what follows each token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).numpy()


def check(records, token_ids, rows, count):
    """Records of tokens against the log-probabilities at the positions before them."""
    assert len(records) == len(token_ids) == len(rows)
    for record, token, row in zip(records, token_ids, rows, strict=True):
        np.testing.assert_allclose(record.logprob, row[token], atol=1e-4)
        assert record.top[token] == record.logprob  # the same number, bit for bit
        assert record.rank == int((row > row[token]).sum()) + 1
        likely = np.argsort(-row)[:count]
        assert set(record.top) == {*likely.tolist(), token}
        top = sorted(record.top.values(), reverse=True)[:count]
        np.testing.assert_allclose(top, row[likely], atol=1e-4)


@pytest.mark.parametrize(
    "layout", ["contiguous", pytest.param("chunks and prefixes", marks=pytest.mark.slow)]
)
def test_logprobs(llm, folder, model, ids, layout):
    """In a batch of requests that want different things. The prompt is computed although its prefix
    is cached.
    """
    if LAYOUTS[layout]:
        llm = LLM.load(folder, **EXACT, **LAYOUTS[layout])
    prompts = [ids[0].tolist() * 2, ids[1].tolist() * 2, ids[0].tolist() * 2, ids[2].tolist()]
    hot = {"temperature": 1.5, "ignore_eos": True, "max_new_tokens": 6}
    params = [
        SamplingParams(logprobs=3, prompt_logprobs=4, **hot),
        SamplingParams(**hot),
        SamplingParams(prompt_logprobs=0, max_new_tokens=0),
        SamplingParams(logprobs=0, repetition_penalty=1.5, **hot),
    ]
    requests = [GenerationRequest(*pair) for pair in zip(prompts, params, strict=True)]
    completions = sorted(llm.completions(iter(requests)), key=lambda each: each.index)
    for request, completion in zip(requests, completions, strict=True):
        params, prompt = request.params, list(request.prompt)
        assert (completion.finish_reason, completion.error) == ("length", None)
        assert len(completion.token_ids) == params.max_new_tokens
        rows = hf_logprobs(model, [*prompt, *completion.token_ids])
        if params.logprobs is None:
            assert completion.logprobs == ()
        else:
            rows_after = rows[len(prompt) - 1 : -1]
            check(completion.logprobs, completion.token_ids, rows_after, params.logprobs)
        if params.prompt_logprobs is None:
            assert completion.prompt_logprobs == ()
        else:
            first, *others = completion.prompt_logprobs
            assert first is None
            check(others, prompt[1:], rows[: len(prompt) - 1], params.prompt_logprobs)


@pytest.mark.slow
def test_choices_and_streams(llm, model, ids):
    """The first choice has those of the prompt, and its first delta, too."""
    prompt = ids[0].tolist()
    params = SamplingParams(logprobs=1, prompt_logprobs=1, n=2, max_new_tokens=3, ignore_eos=True)
    deltas = list(llm.run([GenerationRequest(prompt, params)], slots=2, length=32))
    completions = [delta.completion for delta in deltas if delta.completion]
    for choice in range(2):
        parts = [delta for delta in deltas if delta.choice == choice]
        (completion,) = [each for each in completions if each.choice == choice]
        assert [each for delta in parts for each in delta.logprobs] == list(completion.logprobs)
        assert parts[0].prompt_logprobs == completion.prompt_logprobs
        assert len(completion.prompt_logprobs) == (0 if choice else len(prompt))


@pytest.mark.slow
def test_cached_tokens_are_counted(folder):
    llm = LLM.load(folder, **EXACT, **LAYOUTS["chunks and prefixes"])
    request = GenerationRequest(list(range(5, 25)), SamplingParams(max_new_tokens=2))
    counts = [next(iter(llm.completions(iter([request])))).num_cached_tokens for _ in range(2)]
    assert counts == [0, 16]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 129, True, 1.5])
def test_invalid_counts(name, value):
    with pytest.raises(Exception, match=name):
        SamplingParams(**{name: value})
