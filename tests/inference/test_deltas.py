"""What the deltas of a completion contain, and which requests share the prefix cache."""

from dataclasses import replace

import pytest

from maxtext import LLM
from maxtext.inference import GenerationRequest, SamplingParams
from maxtext.inference.engine.sequence import StepOutput
from maxtext.inference.sampling.logprobs import TokenLogprobs
from maxtext.inference.text.session import OutputProcessor
from maxtext.inference.validation import RequestError
from maxtext.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()


def deltas_of(text, size, **params):
    """The deltas of a completion whose tokens, the bytes of a text, come `size` at a time."""
    request = GenerationRequest(BYTES.encode("x"), SamplingParams(max_new_tokens=99, **params))
    processor = OutputProcessor(0, 0, request, request, BYTES)
    tokens = BYTES.encode(text)
    deltas = []
    for start in range(0, len(tokens), size):
        new = tuple(tokens[start : start + size])
        is_last = start + size >= len(tokens)
        output = StepOutput(
            request_id=0,
            sampled_tokens=new,
            logprobs=tuple(TokenLogprobs(-float(token), {}) for token in new),
            finish_reason="length" if is_last else None,
        )
        deltas.append(processor.add(output))
        if deltas[-1].completion is not None:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", [(), ("STOP",)])
def test_tokens_and_log_probabilities_come_with_their_text(size, stop):
    """Bytes of a character come together, and so do those of what may be a stop string."""
    text = "añ 🦊 STO ST🦊 end"
    deltas = deltas_of(text, size, stop=stop, logprobs=0)
    so_far_ids, so_far_text = [], ""
    for delta in deltas:
        so_far_ids += delta.token_ids
        so_far_text += delta.text
        assert [-each.logprob for each in delta.logprobs] == list(delta.token_ids)
        assert so_far_text.startswith(BYTES.decode(so_far_ids))
    assert (so_far_text, so_far_ids) == (text, BYTES.encode(text))
    assert deltas[-1].completion.text == text


def test_delta_that_ends_at_a_stop_text():
    deltas = deltas_of("one STOP two", 2, stop=("STOP",), logprobs=0)
    completion = deltas[-1].completion
    assert (completion.text, completion.finish_reason) == ("one ", "stop")
    assert [token for delta in deltas for token in delta.token_ids] == BYTES.encode("one STOP")
    assert list(completion.token_ids) == BYTES.encode("one STOP")


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_salt_separates_prefixes(folder):
    llm = LLM.load(
        folder,
        dtype="float32",
        weight_dtype="float32",
        enable_prefix_caching=True,
        pagedattn_tokens_per_page=4,
        max_target_length=64,
    )
    request = GenerationRequest(list(range(5, 25)), SamplingParams(max_new_tokens=2))
    counts = [
        next(iter(llm.completions(iter([replace(request, cache_salt=salt)])))).num_cached_tokens
        for salt in ("", "one", "two", "one", "")
    ]
    assert counts == [0, 0, 0, 16, 16]
    with pytest.raises(RequestError, match="cache_salt must be text, not 5"):
        llm.prepare(llm.engine, replace(request, cache_salt=5))


def test_times(llm):
    request = GenerationRequest("w5", SamplingParams(max_new_tokens=3, ignore_eos=True))
    times = next(iter(llm.completions([request]))).times
    assert 0 < times.started_at <= times.first_token_at <= times.finished_at
