"""`maxtext decode`: complete a prompt, streaming the text.

In a pipe, standard output is the completion and nothing else; timings go to standard error.
"""

import sys
import time

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.generation import (
    DIM,
    GenerationSession,
    load_session,
    note,
    refuse_useless,
    resolve_named_model,
    write,
)
from maxtext.common import progress
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.trees import common_prefix_length
from maxtext.configs.types import MaxTextConfig

DIFF_CHARACTERS = 40  # of two texts, shown from where they differ
USELESS = {"enable_model_warmup": "the one prompt warms it up"}


def run(arguments: Arguments) -> int:
    file, overrides = positionals.split(arguments.all_args, data=None)
    model = resolve_named_model("maxtext decode MODEL prompt=TEXT", file, overrides)
    config = model.config
    refuse_useless(config, "decode", USELESS)
    check_sampling(config)
    session = load_session(model)
    prompt_ids = session.encode_prompt(config.prompt)
    max_new_tokens = session.max_new_tokens(prompt_ids)  # an error comes before any output
    prefix = config.prompt if sys.stdout.isatty() and not config.use_chat_template else ""
    if config.multi_sampling or config.return_log_prob:
        texts = write_all(session, prompt_ids, max_new_tokens, prefix)
    else:
        texts = [stream_one(session, prompt_ids, max_new_tokens, prefix)]
    if config.autoregressive_decode_assert:
        assert_text(config.autoregressive_decode_assert, texts[0])
    return 0


def check_sampling(config: MaxTextConfig) -> None:
    """Raise ConfigError if multi_sampling is set but cannot give several different completions."""
    if not config.multi_sampling:
        return
    if config.decode_sampling_strategy.value == "greedy":
        raise ConfigError(
            "multi_sampling=true would repeat the same completion: "
            "decode_sampling_strategy=greedy is deterministic; use weighted, topk, nucleus or "
            "composite"
        )
    if config.autoregressive_decode_assert:
        raise ConfigError(
            "autoregressive_decode_assert is about one completion: leave multi_sampling out"
        )
    if config.per_device_batch_size < 2:
        raise ConfigError(
            f"multi_sampling=true samples per_device_batch_size={config.per_device_batch_size:g} "
            "completions: raise it"
        )


def build_requests(
    session: GenerationSession, prompt_ids: list[int], max_new_tokens: int, count: int
) -> list[object]:
    """The same prompt `count` times, each with its own seed."""
    from maxtext.inference import GenerationRequest, SamplingParams

    config = session.config
    return [
        GenerationRequest(
            prompt_ids,
            SamplingParams.from_config(
                config,
                max_new_tokens=max_new_tokens,
                seed=config.init_weights_seed + index,
                logprobs=0 if config.return_log_prob else None,
            ),
        )
        for index in range(count)
    ]


def stream_one(
    session: GenerationSession, prompt_ids: list[int], max_new_tokens: int, prefix: str
) -> str:
    """Stream one completion after `prefix`, and return its text."""
    (request,) = build_requests(session, prompt_ids, max_new_tokens, 1)
    start, first_token_seconds, completion = time.perf_counter(), 0.0, None
    for text_delta, result in session.stream(request):
        if not first_token_seconds:
            first_token_seconds = time.perf_counter() - start
            write(prefix, DIM)
        write(text_delta)
        completion = result
    write("\n")
    assert completion is not None, "the last delta comes with the completion"
    num_tokens = len(completion.token_ids)
    print_timings(session, first_token_seconds, num_tokens, time.perf_counter() - start)
    if completion.finish_reason == "length":
        note(f"the completion ends at max_target_length={session.config.max_target_length}")
    return completion.text or ""


def write_all(
    session: GenerationSession, prompt_ids: list[int], max_new_tokens: int, prefix: str
) -> list[str]:
    """Write all completions as they finish, or their tokens with log-probabilities."""
    config = session.config
    count = int(config.per_device_batch_size) if config.multi_sampling else 1
    start, num_tokens, texts = time.perf_counter(), 0, [""] * count
    if sys.stdout.isatty():
        write(prefix, DIM)
        write("\n")
    progress.start("compiling and generating")
    requests = build_requests(session, prompt_ids, max_new_tokens, count)
    for completion in session.llm.completions(requests):
        if completion.error:
            raise UserError(completion.error)
        num_tokens += len(completion.token_ids)
        texts[completion.index] = completion.text or ""
        if count > 1:
            write(f"--- completion {completion.index + 1} of {count}\n", DIM)
        if not config.return_log_prob:
            write(f"{completion.text}\n")
        else:
            for token, scores in zip(completion.token_ids, completion.logprobs, strict=True):
                # repr keeps a token on its line.
                text = session.tokenizer.id_to_token(token)
                write(f"{scores.logprob:9.4f}  {token:6d}  {text!r}\n")
    print_timings(session, None, num_tokens, time.perf_counter() - start)
    return texts


def print_timings(
    session: GenerationSession, first_token_seconds: float | None, num_tokens: int, seconds: float
) -> None:
    parts = [f"loaded in {session.load_seconds:.1f} s"]
    if first_token_seconds is not None:
        parts.append(f"first token after {first_token_seconds:.2f} s")
    rate = f"{num_tokens / max(seconds, 1e-9):,.1f} tokens/s"
    note(", ".join([*parts, f"{num_tokens:,} tokens", rate]))


def assert_text(expected: str, text: str) -> None:
    """Raise UserError if a completion is not the expected one; for tests."""
    if text == expected:
        return
    start = common_prefix_length(expected, text)
    end = start + DIFF_CHARACTERS
    raise UserError(
        f"the completion differs from autoregressive_decode_assert: from character {start} on it "
        f"should be {expected[start:end]!r} and is {text[start:end]!r}"
    )
