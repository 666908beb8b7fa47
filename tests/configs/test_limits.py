"""Values that a type admits and the program cannot use: numbers too large, text that no file takes,
paths elsewhere.
"""

import re
from typing import Any

import pytest

from maxtext.cli.main import main
from maxtext.common.errors import ConfigError
from maxtext.configs import fields, ledger, limits, sources
from maxtext.configs.derive import Devices
from maxtext.configs.load import base_values
from maxtext.configs.types import DerivedValues, declaration
from maxtext.models.configuration import load

ONE = Devices(1)
INTEGERS = [
    key
    for key in fields.KEYS
    if int in fields.members(key) and key not in DerivedValues.model_fields
]
FLOATS = [
    key
    for key in fields.KEYS
    if float in fields.members(key) and key not in DerivedValues.model_fields
]


def problems(*settings: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as refusal:
        load(None, settings, environ=environ or {}, devices=ONE)
    return str(refusal.value)


def test_defaults_are_within_the_limits():
    assert limits.problems(base_values(), fields.KEYS) == []


@pytest.mark.parametrize("sign", ["", "-"])
def test_every_integer_key_has_a_range(sign):
    for key in INTEGERS:
        assert re.search(
            rf"^{key}=.*(out of range|expected)", problems(f"{key}={sign}{10**29}"), re.M
        ), key


@pytest.mark.parametrize("value", ["1e300", "-1e300", ".inf", ".nan"])
def test_every_float_key_fits_float32(value):
    for key in FLOATS:
        assert re.search(rf"^{key}=.*(out of range|expected)", problems(f"{key}={value}"), re.M), (
            key
        )


def test_wide_integer_keys_exceed_int32():
    config = load(
        None,
        ["rope_max_timescale=50000000000", "max_corpus_chars=10000000000000"],
        environ={},
        devices=ONE,
    )
    assert (config.rope_max_timescale, config.max_corpus_chars) == (5 * 10**10, 10**13)


@pytest.mark.parametrize(
    ("settings", "expected"),
    {
        "steps": (["steps=999999999999999999999999999999"], "steps=9{30} .* is out of range"),
        "width": (["base_emb_dim=99999999999999999999"], "base_emb_dim=9{20} .* is out of range"),
        "more digits than Python reads": (
            [f"steps={'9' * 5000}"],
            "steps=9{40}…: not a valid value",
        ),
        "sizes that multiply": (
            ["global_parameter_scale=1073741824"],
            "num_decoder_layers=16384 .* out of range",
        ),
        "batch": (["per_device_batch_size=1e30"], "global_batch_size_to_train_on=.* out of range"),
        "list": (["engram_layers=[99999999999]"], "engram_layers=.* out of range"),
        "heads of a delta net": (["gdn_num_key_heads=0"], "gdn_num_key_heads=0 is out of range"),
        "empty": (["steps="], r"^steps has no value \(command line\): expected a whole number$"),
        "no such day": (["steps=2001-13-45"], "not a valid value: month"),
        "deep list": ([f"mlp_activations={'[' * 5000}{']' * 5000}"], "nested more than 50 deep"),
        "list in itself": (["mlp_activations=&a [*a]"], "contains itself"),
        "NUL": (["prompt=a\0b"], "prompt=.* NUL"),
        "NUL in a list": (['adamw_mask=["a\\0"]'], "adamw_mask=.* NUL"),
        "no UTF-8": (["prompt=\udcff"], "prompt=.* not UTF-8"),
        "parent": (["run_name=../../x"], "run_name=.* outside of base_output_directory"),
        "absolute": (["run_name=/tmp/x"], "run_name=.* outside of base_output_directory"),
        "the folder itself": (["run_name=."], "run_name=.* outside of base_output_directory"),
        "NUL in a path": (["run_name=a\0"], "run_name=.* NUL"),
        "line end in a path": (
            ["base_output_directory=a\nb"],
            "base_output_directory=.* control character",
        ),
        "long name": ([f"run_name={'a' * 300}"], "run_name=.* 255 bytes"),
        "unknown home": (
            ["load_parameters_path=~no-such-user/x"],
            "home folder of an unknown user",
        ),
    }.values(),
)
def test_unusable_value(settings, expected):
    assert re.search(expected, problems(*settings))


def test_run_name_may_contain_a_subfolder():
    config = load(None, ["run_name=team/run 1 (final)"], environ={}, devices=ONE)
    assert config.metrics_dir == "./maxtext_output/team/run 1 (final)/metrics"


def test_jobset_name_is_checked():
    assert "run_name='../x'" in problems(environ={"JOBSET_NAME": "../x"})


PATH_KEYS = {key for key in fields.KEYS if declaration(key).is_path}


@pytest.mark.parametrize("key", sorted(PATH_KEYS - {"base_config"}))
def test_remote_paths_are_refused(key):
    wanted = problems(f"{key}=gs://bucket/folder")
    assert re.search(
        rf"^{key}='gs://bucket/folder' \(command line\) is a remote path", wanted, re.M
    )


def test_every_key_that_names_a_path_is_checked():
    """By name; what does not act is refused anyway."""
    named = {key for key in fields.KEYS if re.search("_(path|dir|directory|file|files)$", key)}
    acting = {key for key in named if ledger.status(key).kind == "acts"}
    urls = {"hf_path", "hf_data_dir", "hf_train_files", "hf_eval_files"}  # `datasets` opens them
    functions = {"formatting_func_path", "reward_functions_path"}  # checked when loaded
    patterns = {"lora_module_path"}  # over the paths of weights
    assert acting - urls - functions - patterns <= PATH_KEYS


@pytest.mark.parametrize(
    "args",
    [
        ["convert", "from_hf", "gs://bucket/model", "out"],
        ["convert", "from_hf", "model", "s3://bucket/out"],
        ["inspect", "hf://org/model"],
        ["chat", "https://example.com/model"],
        ["batch", "in.jsonl", "gs://bucket/out.jsonl", "--model", "model"],
        ["batch", "in.jsonl", "out.jsonl", "--model=gs://bucket/model"],
        ["train", "gs://bucket/mine.yml"],
        ["train", "load_parameters_path=gs://bucket/model"],
        ["data", "prepare", "--out", "gs://bucket/tokens"],
        ["tokenizer", "train", "--out", "gs://bucket/tokenizer", "a.txt"],
        ["tokenizer", "inspect", "gs://bucket/tokenizer"],
        ["decode", "load_parameters_path=gs://bucket/model"],
    ],
    ids=" ".join,
)
def test_remote_arguments_are_refused(args, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    assert "is a remote path" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_prompt_may_have_a_url_in_it(capsys):
    assert main(["tokenizer", "inspect", "byte", "https://example.com"]) == 0
    assert (
        load(None, ["prompt=https://example.com"], environ={}, devices=ONE).prompt
        == "https://example.com"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "mlp_activations: " + "[" * 5000 + "]" * 5000,
            "mine.yml line 1.*nested more than 50 deep",
        ),
        (
            "mlp_activations:\n" + "".join("  " * depth + "-\n" for depth in range(100)),
            "nested more than 50 deep",
        ),
        (
            "adamw_mask:\n- &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"- &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(9)
            ),
            "values, aliases expanded",
        ),
        ("steps: 2001-13-45", "month must be"),
        ("load_parameters_path: [1]", "load_parameters_path=.*expected text"),
    ],
    ids=["deep flow", "deep block", "billion laughs", "date", "list for a path"],
)
def test_unusable_file(text: str, expected: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(text)
    assert main(["train", "mine.yml"]) == 2
    assert re.search(expected, capsys.readouterr().err)


NEAREST: dict[str, Any] = {
    "learning_rat": ["learning_rate"],
    "checkpoint_perod": ["checkpoint_period"],
    "enable_profiler": ["profiler", "enable_jax_profiler", "profiler_steps"],
    "capacity": ["capacity_factor"],
    "batch_size_per_device": ["per_device_batch_size"],
    "zzzzzz": [],
}


@pytest.mark.parametrize("word", NEAREST)
def test_suggests_nearest_keys(word):
    hint = sources.suggest(word, fields.KEYS)
    suggested = re.findall(r"\w+", hint.removeprefix("; did you mean").replace(" or ", " "))
    assert suggested[: len(NEAREST[word])] == NEAREST[word]
    assert len(suggested) == len(NEAREST[word]) or len(NEAREST[word]) == 1


def test_typing_error_has_one_suggestion():
    assert sources.suggest("learning_rat", fields.KEYS) == "; did you mean learning_rate?"


def test_bytes_that_are_not_utf8_are_shown_escaped(capsys):
    assert main(["config", "use_ragged_attention=\udcff"]) == 2
    assert "use_ragged_attention=\\udcff" in capsys.readouterr().err
