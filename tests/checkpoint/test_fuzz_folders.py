"""Hugging Face folders with damaged JSON files: each opens, or is refused in a sentence; nothing
else is raised.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from maxtext.checkpoint.convert.command import unrolled_model
from maxtext.checkpoint.open import open_checkpoint
from maxtext.common.errors import UserError
from maxtext.common.files import read_json_object
from maxtext.tokenizers import find_tokenizer
from tests.checkpoint.hf_folders import FAMILIES, write_hf_folder

FILES = (
    "config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "generation_config.json",
    "tokenizer.json",
)
SHARES = (10, 3, 2, 2, 1)  # how often each file is chosen
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    10**6,
    2**31,
    10**30,
    -(10**30),
    0.0,
    0.5,
    -1.5,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "64",
    "two",
    "full_attention",
    "../../etc/passwd",
    "a\0b",
    "\ud800",
    "é" * 300,
    [],
    [[]],
    [0],
    [1, "a"],
    ["x"],
    ["Qwen3ForCausalLM"],
    {},
    {"a": 1},
    {"content": 5},
    {"rope_type": "yarn"},
    {"rope_type": "llama3", "factor": 0},
    {"quant_method": "fp8"},
    {"0": {"head_dim": 0}},
)


def paths_in(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values in nested lists and objects."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path] + [inner for key, item in items for inner in paths_in(item, (*path, key))]


def mutate(text: str, rng: random.Random) -> str:
    """One to three random changes of a JSON text: values, entries, or the text itself."""
    kind = rng.random()
    if kind < 0.05:
        return text[: rng.randrange(len(text))]
    if kind < 0.1:
        info = rng.randrange(len(text))
        return (
            text[:info]
            + rng.choice(["[", "}", '"', ",", "\\", "[" * 100_000, "\0", "NaN", "9" * 5000])
            + text[info:]
        )
    if kind < 0.12:
        return rng.choice(["", "[[[", "[]", "null", "5", '"text"', "[" * 100_000 + "]" * 100_000])
    whole = [json.loads(text)]
    for _ in range(rng.choice([1, 1, 2, 3])):
        *above, last = rng.choice([path for path in paths_in(whole) if path])
        parent: Any = whole
        for step in above:
            parent = parent[step]
        action = rng.random()
        if action < 0.15 and above:
            del parent[last]
        elif (
            action < 0.3
            and isinstance(parent[last], int | float)
            and not isinstance(parent[last], bool)
        ):
            parent[last] = parent[last] * rng.choice([-1, 0, 2, 3, 10**12]) + rng.choice(
                [0, 1, 0.5]
            )
        elif action < 0.35 and isinstance(parent[last], dict):
            parent[last][
                rng.choice(["text_config", "rope_scaling", "head_dim", "layer_types", "x"])
            ] = rng.choice(VALUES)
        else:
            parent[last] = rng.choice(VALUES)
        if not whole:
            break
    return json.dumps(whole[0])


def use(folder: Path) -> None:
    """What every verb does with a folder before weights are read."""
    checkpoint = open_checkpoint(folder)
    config, param_infos = unrolled_model(checkpoint)
    checkpoint.weights(config, param_infos)
    for file in checkpoint.hf_assets:
        if file.name in ("config.json", "generation_config.json"):
            read_json_object(file)
    if tokenizer := find_tokenizer(checkpoint.hf_assets):
        tokenizer.decode(tokenizer.encode("some text"))


def fuzz(folder: Path, seed: int, cases: int) -> tuple[int, int]:
    """(folders that opened, folders that were refused)."""
    opened = refused = 0
    rng = random.Random(seed)
    for case in range(cases):
        name = rng.choices(FILES, SHARES)[0]
        before = (folder / name).read_text()
        after = mutate(before, rng)
        (folder / name).write_text(after, errors="surrogatepass")
        try:
            use(folder)
            opened += 1
        except UserError:
            refused += 1
        except Exception as error:
            changed = [line for line in after.splitlines() if line not in before]
            raise AssertionError(
                f"{folder.name}, seed {seed}, case {case}, {name}: {str(changed)[:2000]}"
            ) from error
        finally:
            (folder / name).write_text(before)
    return opened, refused


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """(name of a model) -> its folder."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write_hf_folder(tmp_path_factory.mktemp("fuzz") / name, name)
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_the_folders_are_good(name, folders):
    use(folders(name))


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma3-4b"])
def test_some_mutations(name, folders):
    opened, refused = fuzz(folders(name), seed=0, cases=25)
    assert opened
    assert refused


@pytest.mark.slow
@pytest.mark.parametrize("cases", [120, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_many_mutations(folders, cases):
    """Over all families."""
    counts = [fuzz(folders(name), seed=2, cases=cases // len(FAMILIES) + 1) for name in FAMILIES]
    assert sum(opened + refused for opened, refused in counts) >= cases
    assert all(opened and refused for opened, refused in counts)


QWEN = "qwen3-0.6b"
WRONG = {
    "text for a size": ({"hidden_size": "64"}, 'hidden_size is "64", expected a whole number'),
    "no heads": (
        {"num_attention_heads": 0},
        "num_attention_heads is 0, expected a whole number from 1",
    ),
    "no key heads": (
        {"num_key_value_heads": 3},
        "num_attention_heads=4 is not a multiple of num_key_value_heads=3",
    ),
    "text for a base": (
        {"rope_parameters": {"rope_theta": "x"}},
        'rope_parameters.rope_theta is "x", expected',
    ),
    "text for a base, older form": ({"rope_theta": "x"}, 'rope_theta is "x", expected a number'),
    "list of rotations": ({"rope_parameters": []}, r"rope_parameters is \[\], expected an object"),
    "text for a token": ({"eos_token_id": "two"}, 'eos_token_id is "two", expected a whole number'),
    "text for architectures": (
        {"architectures": "Qwen3ForCausalLM"},
        "architectures is .* expected a list of names",
    ),
    "null for a size": ({"hidden_size": None}, "hidden_size is null"),
    "too many layers": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000, expected .* to 10,000",
    ),
    "layers of other lengths": ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    "text for a bool": (
        {"tie_word_embeddings": "no"},
        "tie_word_embeddings is .* expected true or false",
    ),
    "no object in text_config": ({"text_config": [1]}, "text_config is .* expected an object"),
    "inside of text_config": ({"text_config": {"hidden_size": "64"}}, "text_config.hidden_size is"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_field(name, folders, tmp_path):
    folder = shutil.copytree(folders(QWEN), tmp_path / "model")
    change, expected = WRONG[name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=f"config.json: {expected}"):
        use(folder)


def test_no_architectures_goes_by_the_model_type(folders, tmp_path):
    folder = shutil.copytree(folders(QWEN), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": []}))
    use(folder)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "model.safetensors.index.json",
            '{"weight_map": {"lm_head.weight": 5}}',
            "weight_map names no .safetensors",
        ),
        ("model.safetensors.index.json", '{"weight_map": []}', "weight_map must be an object"),
        ("generation_config.json", "[[[", "generation_config.json is not valid JSON"),
        ("generation_config.json", "[" * 100_000, "generation_config.json is not valid JSON"),
        ("generation_config.json", '{"eos_token_id": "two"}', "eos_token_id is"),
        ("tokenizer_config.json", "[[[", "tokenizer_config.json is not valid JSON"),
        ("config.json", "[" * 100_000, "config.json is not valid JSON"),
    ],
    ids=["index", "index list", "generation", "deep", "end", "tokenizer", "deep config"],
)
def test_wrong_file(file, text, expected, folders, tmp_path):
    folder = shutil.copytree(folders(QWEN), tmp_path / "model")
    (folder / file).write_text(text)
    with pytest.raises(UserError, match=expected):
        use(folder)
