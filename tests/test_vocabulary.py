"""Names and phrases that this code base has retired, each with the one to use instead.

A private word for a standard thing is a defect: readers search for the name that they know from
papers, PyTorch, vLLM, Flax and Hugging Face. CONTRIBUTING.md states the rule.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Names in Python source, and words in code spans of documents.
IDENTIFIERS = {
    "Ask": "GenerationRequest",
    "Answer": "Completion",
    "Wishes": "SamplingParams",
    "News": "StepOutput",
    "Drawn": "sampled_tokens",
    "Queued": "Sequence",
    "Work": "Sequence",
    "Prompts": "PrefillBatch",
    "scorer": "ModelRunner",
    "of_prompts": "ModelRunner.prefill",
    "halted": "finished_mask",
    "give_up": "evict",
    "most_idle": "max_cached_blocks",
    "Joined": "PackedLinear",
    "Maker": "Initializer",
    "maker": "initializer",
    "eight_bits": "fp8 or int8",
    "low_precision": "fp8 or int8",
    "one_token": "decode",
    "one_row": "gemv",
    "few_rows": "small_batch_matmul",
    "one_by_one": "decode step",
    "of_x": "dx",
    "of_norm": "dscale",
    "of_kernels": "dw",
    "of_hidden": "dhidden",
    "turnable": "can_transpose",
    "both_ways": "transposed",
    "laid_out": "layout",
    "lay_out": "layout",
    "Setup": "RunContext",
    "Feed": "DataLoader",
    "TrainFeed": "DataLoader",
    "Share": "ShardSpec",
    "GO_ON": "stop flags",
    "carried": "hf_assets",
    "theirs": "hf_*",
    "ours": "native_*",
    "their_config": "hf_config",
    "unsaid": "unsupported",
    "cli_words": "arguments",
    "from_words": "from_overrides",
    "settled": "load_config",
    "acts_only": "inert_unless",
    "join_trees": "merge_dicts",
    "token_weights": "target_mask",
    "right_answers": "answer_column",
    "nearly_right": "partial_accuracy",
    "all_words": "all_args",
    "split_words": "split_overrides",
    "TokenPairs": "TokenSequence",
    "ToPairs": "ToPreferencePairs",
    "FittedRows": "FitRowsIterator",
    "Elsewhere": "NeutralAtOtherEndpoints",
    "MAX_BLOCKS": "NO_BLOCK",
    "is_blocked": "awaits_grammar",
    "last_full_block": "shareable_length",
}
# Anywhere, in upper or lower case, across line breaks.
PHRASES = {
    "going back": "in the backward pass",
    "way back": "backward pass",
    "filled up": "padded",
    "eight bits": "fp8 or int8",
    "of ours": "native",
    "lie as": "are stored as",
    "what is kept of": "what is saved of",
    "side by side": "in parallel",
    "a sign of life": "progress",
    "anew": "again",
}
# Retired names of modules.
MODULES = {
    "ahead.py": "aot.py",
    "compiled.py": "step_cache.py",
    "one_row.py": "gemv",
    "few_rows.py": "small_batch_matmul",
    "rows.py": "rowwise.py",
    "background.py": "prefetch.py",
    "scoring.py": "model_runner.py",
    "answering.py": "generation.py",
    "words.py": "arguments.py",
    "joined.py": "merged linear layers",
    "one_token.py": "decode",
    "eight_bits.py": "fp8",
    "low_precision.py": "fp8/",
    "setup.py": "run_context.py",
    "ladder.py": "score.py",
    "http_protocol.py": "http11.py",
}
FOLDERS = ("src", "tests", "benchmarks", "docs", "examples")


def paths() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS, "*.md"], cwd=ROOT, capture_output=True, text=True
    )
    names = dict.fromkeys(listed.stdout.splitlines())
    wanted = [ROOT / name for name in names if name.endswith((".py", ".md", ".yml"))]
    return [
        path
        for path in wanted
        if path.is_file() and path != Path(__file__) and path.name != "CHANGELOG.md"
    ]


def python_names(text: str) -> Iterator[tuple[str, int]]:
    """(identifier, line) of every name in Python source; strings and comments are prose."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.string, token.start[0]


def markdown_names(text: str) -> Iterator[tuple[str, int]]:
    """(identifier, line) of every word in a code span or block."""
    for span in re.finditer(r"```.*?```|`[^`\n]+`", text, re.DOTALL):
        for word in re.finditer(r"\w+", span[0]):
            yield word[0], text.count("\n", 0, span.start() + word.start()) + 1


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    texts = {path: path.read_text(encoding="utf-8") for path in paths()}
    if not texts:
        pytest.skip("not a Git checkout")
    return texts


@pytest.fixture(scope="module")
def uses(texts) -> dict[str, list[str]]:
    """Where each retired identifier is used."""
    uses: dict[str, list[str]] = {name: [] for name in IDENTIFIERS}
    readers = {".py": python_names, ".md": markdown_names}
    for path, text in texts.items():
        for name, line in readers.get(path.suffix, lambda _: ())(text):
            if name in uses:
                uses[name].append(f"{path.relative_to(ROOT)}:{line}")
    return uses


@pytest.mark.parametrize("name", IDENTIFIERS)
def test_retired_identifier(name, uses):
    assert not uses[name], f"say {IDENTIFIERS[name]}"


@pytest.mark.parametrize("phrase", PHRASES)
def test_retired_phrase(phrase, texts):
    words = r"[\s#]+".join(map(re.escape, phrase.split()))
    pattern = re.compile(rf"\b{words}\b", re.IGNORECASE)
    uses = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path, text in texts.items()
        for match in pattern.finditer(text)
    ]
    assert not uses, f"say {PHRASES[phrase]}"


@pytest.mark.parametrize("name", MODULES)
def test_retired_module(name, texts):
    uses = [str(path.relative_to(ROOT)) for path in texts if path.name == name]
    assert not uses, f"name it {MODULES[name]}"


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(docstring, line) of a module, its classes and its functions."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text, node.body[0].lineno


def test_docstrings_of_the_package_begin_with_a_noun_or_a_verb(texts):
    """Not with a bare relative: "The requirements of a key", not "What a key needs"."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, text in texts.items()
        if path.suffix == ".py" and path.is_relative_to(ROOT / "src")
        for docstring, line in docstrings(ast.parse(text))
        if docstring.split(maxsplit=1)[0] in ("What", "Those", "That")
    ]
    assert not found
