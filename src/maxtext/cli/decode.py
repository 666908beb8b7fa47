"""`maxtext decode`: what a model writes after a prompt, as it comes.

In a pipe, standard output is what the model wrote and nothing else; figures go to standard error.
"""

import os
import sys
import time
from typing import Any

from maxtext.cli import arguments
from maxtext.cli.answering import DIM, Answering, note, open_model, refuse, settle, write
from maxtext.common import progress
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs import load, sources
from maxtext.configs.load import peek_setting
from maxtext.configs.types import MaxTextConfig

CONTEXT = 40  # characters of two texts that are shown where they part
USELESS = {"enable_model_warmup": "the one prompt warms it up"}


def run(args: list[str]) -> int:
    path, overrides = arguments.split(args)
    place = model_place(path, overrides)
    config = settle(place, path, overrides)
    refuse(config, "decode", USELESS)
    check(config)
    model = open_model(place, config)
    ids = model.prompt(config.prompt)
    room = model.room(ids)  # before anything is shown
    lead = config.prompt if sys.stdout.isatty() and not config.use_chat_template else ""
    if config.multi_sampling or config.return_log_prob:
        texts = listed(model, ids, room, lead)
    else:
        texts = [streamed(model, ids, room, lead)]
    if config.autoregressive_decode_assert:
        compare(config.autoregressive_decode_assert, texts[0])
    return 0


def model_place(path: str | None, overrides: list[str]) -> str:
    """A checkpoint, or the name of a model that is to have random weights."""
    layer = sources.from_overrides(overrides)
    for key in ("load_parameters_path", "model_name"):
        value = peek_setting(key, path, layer, os.environ)
        if value not in (None, "", "default"):
            return str(value)
    load(path, layer)  # a misspelt key is told first
    raise ConfigError(
        "which model? set load_parameters_path=DIR, a Hugging Face folder or a checkpoint of ours; model_name=NAME "
        "alone gives random weights"
    )


def check(config: MaxTextConfig) -> None:
    if not config.multi_sampling:
        return
    if config.decode_sampling_strategy.value == "greedy":
        raise ConfigError(
            "multi_sampling=true would draw the same completion again and again: decode_sampling_strategy=greedy has "
            "no choice; use weighted, topk, nucleus or composite"
        )
    if config.autoregressive_decode_assert:
        raise ConfigError(
            "autoregressive_decode_assert is about one completion: leave multi_sampling out"
        )
    if config.per_device_batch_size < 2:
        raise ConfigError(
            f"multi_sampling=true draws per_device_batch_size={config.per_device_batch_size:g} completions: raise it"
        )


def asks(model: Answering, ids: list[int], room: int, count: int) -> list[Any]:
    """The same prompt so many times, each with a seed of its own."""
    from maxtext.inference import Ask
    from maxtext.inference.sampling import Sampling

    sampling, seed = Sampling.of(model.config), model.config.init_weights_seed
    log_probs = model.config.return_log_prob
    return [
        Ask(ids, room, sampling, seed=seed + number, log_probs=log_probs) for number in range(count)
    ]


def streamed(model: Answering, ids: list[int], room: int, lead: str) -> str:
    """One completion, shown after `lead` as it comes."""
    (ask,) = asks(model, ids, room, 1)
    began, first, answer = time.perf_counter(), 0.0, None
    for piece, whole in model.spoken(ask):
        if not first:
            first = time.perf_counter() - began
            write(lead, DIM)
        answer = whole or answer
        write(piece)
    write("\n")
    assert answer is not None, "the last piece comes with the answer"
    figures(model, first, len(answer.ids), time.perf_counter() - began)
    if answer.finished == "length":
        note(f"the completion ends here because max_target_length={model.config.max_target_length}")
    return answer.text or ""


def listed(model: Answering, ids: list[int], room: int, lead: str) -> list[str]:
    """All completions when they are complete, or their tokens with log-probabilities."""
    count = int(model.config.per_device_batch_size) if model.config.multi_sampling else 1
    began, tokens, texts = time.perf_counter(), 0, [""] * count
    if sys.stdout.isatty():
        write(lead, DIM)
        write("\n")
    progress.start("compiling for this model and answering")
    for answer in model.llm.answers(asks(model, ids, room, count)):
        if answer.error:
            raise UserError(answer.error)
        tokens += len(answer.ids)
        texts[answer.index] = answer.text
        if count > 1:
            write(f"--- completion {answer.index + 1} of {count}\n", DIM)
        if not model.config.return_log_prob:
            write(f"{answer.text}\n")
        else:
            for token, log_prob in zip(answer.ids, answer.log_probs, strict=True):
                # As Python writes it, so that a token stays on its line.
                write(f"{log_prob:9.4f}  {token:6d}  {model.tokenizer.id_to_token(token)!r}\n")
    figures(model, None, tokens, time.perf_counter() - began)
    return texts


def figures(model: Answering, first: float | None, tokens: int, seconds: float) -> None:
    parts = [f"loaded in {model.loading_seconds:.1f} s"]
    if first is not None:
        parts.append(f"first token after {first:.2f} s")
    note(", ".join([*parts, f"{tokens:,} tokens", f"{tokens / max(seconds, 1e-9):,.1f} tokens/s"]))


def compare(wanted_text: str, text: str) -> None:
    """For tests: the completion must be this one."""
    if text == wanted_text:
        return
    pairs = enumerate(zip(wanted_text, text, strict=False))
    place = next(
        (number for number, (one, other) in pairs if one != other), min(len(wanted_text), len(text))
    )
    raise UserError(
        f"the completion is not autoregressive_decode_assert: from character {place} on it should be "
        f"{wanted_text[place : place + CONTEXT]!r} and is {text[place : place + CONTEXT]!r}"
    )
