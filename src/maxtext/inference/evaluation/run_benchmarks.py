"""Run the benchmarks of `benchmarks.py` on a model."""

from collections.abc import Callable, Sequence

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Json
from maxtext.inference.evaluation.benchmarks import (
    BENCHMARKS,
    Example,
    Sizes,
    accuracy,
    is_correct,
    make_examples,
)
from maxtext.inference.evaluation.perplexity import (
    compute_perplexity,
    make_windows,
    open_texts,
    read_texts,
)
from maxtext.inference.llm import LLM
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.text.session import NO_TOKENIZER
from maxtext.tokenizers import ChatTemplate

STDLIB = "stdlib"  # the perplexity of sources of Python's standard library
STDLIB_FILES = "{stdlib}/json/*.py"
NAMES = (*BENCHMARKS, STDLIB)
DEFAULT_SAMPLES = 48  # of each benchmark
Progress = Callable[[int, int, str], None]  # (completions that are done, of all, their kind)


def parse_names(text: str) -> list[str]:
    """Names separated by commas; all: every one. Raises ConfigError if one is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        problem = f"there is no benchmark {unknown[0]!r}" if unknown else "--builtin needs names"
        raise ConfigError(f"{problem}: choose from {', '.join(NAMES)}, or all")
    return list(dict.fromkeys(names))


def run_benchmarks(
    llm: LLM,
    names: Sequence[str],
    *,
    seed: int,
    samples: int,
    template: ChatTemplate | None,
    progress: Progress | None = None,
) -> dict[str, Json]:
    """The scores of each benchmark, in total and by group. With `template`, a prompt is the message
    of a user. Raises UserError if a prompt does not fit into max_target_length.
    """
    if llm.tokenizer is None:
        raise ConfigError(f"{NO_TOKENIZER}: name one with tokenizer_path=…")
    tokenizer = llm.tokenizer
    sizes = Sizes(llm.config.max_target_length, lambda text: len(tokenizer.encode(text)))
    examples: list[tuple[str, Example]] = []
    requests: list[GenerationRequest] = []
    for name in names:
        if name == STDLIB:
            continue
        for prompt, example in make_examples(name, seed, samples, sizes):
            examples.append((name, example))
            requests.append(make_request(llm, name, prompt, example, template))
    results: dict[str, list[tuple[str, bool]]] = {name: [] for name in names}
    correct: list[bool] = [False] * len(requests)
    for done, completion in enumerate(llm.completions(requests) if requests else (), start=1):
        name, example = examples[completion.index]
        if completion.error is not None:
            raise UserError(f"the benchmark {name} cannot be run: {completion.error}")
        correct[completion.index] = is_correct(completion.text or "", example)
        if progress is not None:
            progress(done, len(requests), "completions")
    for (name, example), is_right in zip(examples, correct, strict=True):
        results[name].append((example.group, is_right))
    return {
        name: stdlib_perplexity(llm, progress) if name == STDLIB else summarize(results[name])
        for name in names
    }


def make_request(
    llm: LLM, name: str, prompt: str, example: Example, template: ChatTemplate | None
) -> GenerationRequest:
    assert llm.tokenizer is not None, "the caller checks it"
    benchmark = BENCHMARKS[name]
    params = SamplingParams(
        max_new_tokens=benchmark.max_new_tokens,
        stop=("\nQ:",),
        structured_outputs={"json": example.schema} if benchmark.masked else None,
    )
    if template is None:
        return GenerationRequest(llm.tokenizer.encode_prompt(prompt), params)
    text = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return GenerationRequest(llm.tokenizer.encode_with_specials(text), params)


def summarize(results: Sequence[tuple[str, bool]]) -> Json:
    groups: dict[str, list[bool]] = {}
    for group, is_right in results:
        groups.setdefault(group, []).append(is_right)
    total = accuracy([is_right for _, is_right in results])
    return total | {"groups": {group: accuracy(values) for group, values in groups.items()}}


def stdlib_perplexity(llm: LLM, progress: Progress | None) -> Json:
    windows = make_windows(llm.config.max_target_length, None, None)
    texts = read_texts(open_texts(STDLIB_FILES))

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total, "windows")

    return compute_perplexity(llm, texts, windows, report).record()


def score_rows(results: dict[str, Json]) -> list[tuple[str, ...]]:
    """A table: the score of each benchmark."""
    rows: list[tuple[str, ...]] = [("benchmark", "metric", "score", "stderr", "samples")]
    for name, result in results.items():
        if name == STDLIB:
            rows.append((name, "bits_per_byte", f"{result['bits_per_byte']:.4f}", "", ""))
            continue
        score, stderr = (f"{result[key]:.4f}" for key in ("accuracy", "stderr"))
        rows.append((name, "accuracy", score, stderr, str(result["samples"])))
    return rows
