"""Random settings on the command line: exit code 0 or 2 with sentences, never a traceback.

Every case goes through `main` as `maxtext config`; the accepted ones also build the abstract model
and trace its forward pass, and some of them go through `maxtext estimate --no-compile`. Nothing is
compiled.
"""

import random

import jax
import jax.numpy as jnp
import pytest

from maxtext.cli.compile import load_for_target
from maxtext.cli.main import main
from maxtext.common.errors import UserError
from maxtext.configs import fields, ledger
from maxtext.models.transformer import make_template
from maxtext.optimizers import build_optimizer

TINY = [
    "base_emb_dim=16", "base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=8",
    "base_mlp_dim=24", "base_num_decoder_layers=2", "vocab_size=300", "max_target_length=32",
    "per_device_batch_size=2", "dataset_type=synthetic",
]  # fmt: skip
ANYTHING = [
    "", "0", "1", "-1", "2", "3", "7", "8", "-7", "1000000", "99999999999999999999", "0.5", "1.5",
    "-0.1", "1e-9", "1e5", "1e400", "nan", ".nan", "inf", "-.inf", "true", "false", "True", "yes",
    "none", "null", "~", "text", "a b", "é",
    "../x", "/", "~", "gs://x", "a\0b", "\udcff", "\n", "[]", "[1]", "[1, 2, 3]", "[a]", "[[a, b]]",
    "[[a, [b]]]", "{}", "{a: 1}", "[", "{", "&a [*a]", "!!python/name:os.system", "'", '"',
    "2001-02-30", "1:99", "0x10", "1_000", "=", "a=b", "[" * 200, "9" * 5000, "full", "flash",
    "int8", "fp8", "float32", "bfloat16", "mla", "llama4", "mixtral",
    "deepseek", "gemma4", "qwen3_next", "custom", "yarn", "muon", "wsd", "explicit",
]  # fmt: skip
COMMANDS = (
    ["config"],
    ["config", "--changed"],
    ["config", "--format", "yaml"],
    ["config", "--format", "json"],
)
ACTING = [key for key in fields.KEYS if ledger.status(key).kind == "acts"]


def random_value(key: str, rng: random.Random) -> str:
    """Often of the key's type, else anything."""
    members = fields.members(key)
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(ANYTHING)
    if choices := fields.choices(key):
        return rng.choice([choice for choice in choices if choice != "default"] or [""])
    if bool in members:
        return rng.choice(["true", "false"])
    if int in members or float in members:
        whole = str(
            rng.choice([-1, 0, 1, 2, 3, 4, 8, 12, 16, 31, 64, 300, 5000, 2**31 - 1, 2**31, 2**63])
        )
        fraction = repr(rng.choice([0.0, 0.1, 0.5, 1.0, 1.5, -2.0, 1e-30, 1e30]))
        return whole if int in members and kind < 0.8 else fraction
    if str in members:
        return rng.choice(ANYTHING)
    return rng.choice(
        [
            "[]",
            "[1]",
            "[0, 1]",
            "[a]",
            "[silu, linear]",
            "[data, fsdp]",
            "{}",
            "{a: 1}",
            "[[a, [fsdp]]]",
        ]
    )


def random_settings(rng: random.Random) -> list[str]:
    """One to four settings of random keys over a tiny model; sometimes arguments that are no
    settings.
    """
    settings = list(TINY) if rng.random() < 0.9 else []
    given = {setting.partition("=")[0] for setting in settings}
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        key = rng.choice(ACTING if rng.random() < 0.85 else [*fields.KEYS])
        if key == "model_name":
            continue  # each has sizes of its own, which the tests of models build
        if key in given:
            settings = [word for word in settings if word.partition("=")[0] != key]
        value = random_value(key, rng)
        if rng.random() < 0.03:
            key = rng.choice([key[:-1], key.upper(), "", "x", f"{key} "])
        settings.append(f"{key}={value}")
        given.add(key)
    if rng.random() < 0.03:
        settings.insert(rng.randrange(len(settings) + 1), rng.choice(ANYTHING))
    return settings


def fuzz(seed: int, cases: int, capsys, builds: int, estimates: int = 0) -> dict[str, int]:
    """How many configurations were accepted, refused, built, and refused when built. `builds`: of
    how many accepted ones the model is built; `estimates`: how many go through `maxtext estimate`,
    too."""
    rng = random.Random(seed)
    counts = dict.fromkeys(("accepted", "refused", "built", "not built"), 0)
    for case in range(cases):
        settings = random_settings(rng)
        command = rng.choice(COMMANDS)
        name = f"seed {seed}, case {case}"
        code = run([*command, *settings], capsys, name)
        counts["accepted" if code == 0 else "refused"] += 1
        if builds and code == 0 and any(word.startswith("base_emb_dim") for word in settings):
            builds -= 1
            counts["built" if build(settings, name) else "not built"] += 1
            if estimates:
                estimates -= 1
                estimate = ["estimate", "--no-compile", "--target", "cpu", *settings]
                run(estimate, capsys, name, codes=(0, 1, 2))  # 1: a folder that does not exist
    return counts


def run(args: list[str], capsys, name: str, codes: tuple[int, ...] = (0, 2)) -> int:
    try:
        code = main(args)
    except BaseException as error:
        raise AssertionError(f"{name}: maxtext {args!r}") from error
    error_text = capsys.readouterr().err
    assert code in codes, (name, args, code)
    assert "Traceback" not in error_text, (name, args)
    assert code == 0 or "maxtext: error: " in error_text, (name, args)
    return code


def build(settings: list[str], name: str) -> bool:
    """Whether an accepted configuration makes a model; one that does not is refused in a
    sentence.
    """
    args = settings if "=" in settings[0] else settings[1:]
    try:
        config, _ = load_for_target(None if args is settings else settings[0], args, "cpu")
        template = make_template(config)
        rows = jax.ShapeDtypeStruct((1, min(config.max_target_length, 64)), jnp.int32)
        jax.eval_shape(
            lambda weights, ids, place: template.bind(weights)(ids, place),
            template.weights,
            rows,
            rows,
        )
        jax.eval_shape(build_optimizer(config, template.axes).init, template.weights)
    except UserError:
        return False
    except Exception as error:
        raise AssertionError(f"{name}: {settings!r}") from error
    return True


def test_random_settings(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    counts = fuzz(0, 60, capsys, builds=4)
    assert counts["accepted"] >= 5
    assert counts["refused"] >= 5
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "builds"), [(200, 12), pytest.param(1000, 60, marks=pytest.mark.exhaustive)]
)
def test_many_random_settings(capsys, monkeypatch, tmp_path, cases, builds):
    monkeypatch.chdir(tmp_path)
    counts = fuzz(1, cases, capsys, builds=builds, estimates=2)
    assert counts["accepted"] + counts["refused"] == cases
    assert counts["built"] >= 0.8 * builds
    assert not list(tmp_path.iterdir())
