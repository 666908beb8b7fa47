"""No silent knobs: what the ledger says of a key is what the source does with it."""

import ast
import re
from pathlib import Path

import pytest

import maxtext.configs
from maxtext.common.errors import ConfigError
from maxtext.configs import base_file, ledger, rules, sources
from maxtext.configs.derive import Devices
from maxtext.configs.load import base_values
from maxtext.configs.rules.rule import need_of
from maxtext.configs.types import DerivedValues, MaxTextConfig, Settings, declaration
from maxtext.configs.types.key import Need
from maxtext.models.configuration import load

PACKAGE = Path(maxtext.configs.__file__).parents[1]
CONFIG_NAMES = {"config"}
# A `Field` writes it to config.json, by its name.
FIELD_KEYS = {"max_position_embeddings"}
# Keys whose whole effect is inside configs/: they choose and merge the layers.
LOADER_KEYS = {
    "base_config",
    "model_name",
    "override_model_config",
    "override_logical_axis_rules",
    "run_name",
    "enable_lora",
    "base_output_directory",
    "tokenizer_path",
    "tokenizer_type",
    "logical_axis_rules",
    "student_overrides",
    "custom_mesh_and_rule",
    "custom_mesh_and_rule_for_eval",
    "num_batches",
    "train_fraction",
    "train_micro_batch_size",
}
INPUTS_BY_PATTERN = {  # derive.py reads these through a name made from another key
    **{
        key: "parallelism" for key in MaxTextConfig.model_fields if key.startswith(("ici_", "dcn_"))
    },
}


def reads(path: Path) -> set[str]:
    """Keys read as `config.key`, `c.key` or `self.config.key` in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = (
                owner.id
                if isinstance(owner, ast.Name)
                else owner.attr
                if isinstance(owner, ast.Attribute)
                else None
            )
            if name in CONFIG_NAMES:
                found.add(node.attr)
    return found & set(MaxTextConfig.model_fields)


def read_outside() -> set[str]:
    files = [
        path for path in PACKAGE.rglob("*.py") if "configs" not in path.relative_to(PACKAGE).parts
    ]
    return set().union(*map(reads, files))


def derivation_inputs() -> set[str]:
    from maxtext.configs import derive, startup
    from maxtext.configs.types import remat

    found = reads(Path(derive.__file__)) | reads(Path(startup.__file__))
    found |= set(remat.CUSTOM_TENSORS)
    return found | {key for key in INPUTS_BY_PATTERN if key not in DerivedValues.model_fields}


def test_base_yml_is_written_from_the_declarations():
    """After a change of configs/types: make format."""
    assert sources.BASE.read_text(encoding="utf-8") == base_file.base_text()
    assert base_file.REFERENCE.read_text(encoding="utf-8") == base_file.reference_text()


def test_needs_are_conditions_of_settings():
    """A misspelt key in one would show only when a user sets the key that needs it."""
    defaults = base_values()
    for key in Settings.model_fields:
        for name in declaration(key).needs:
            assert isinstance(name, Need) or name in Settings.model_fields
            need = need_of(name)
            assert need.requirement
            need.condition(defaults)


def test_defaults_are_within_their_bounds():
    assert not rules.check_ranges(base_values())


def test_only_keys_that_do_not_act_accept_other_values():
    keys = Settings.model_fields
    assert {key for key in keys if declaration(key).accepts is not None} <= set(ledger.inert_keys())
    assert not set(ledger.inert_keys()) & set(DerivedValues.model_fields)


@pytest.mark.parametrize(
    "setting",
    [
        "enable_nnx=true",
        "pure_nnx=true",
        "pure_nnx_decoder=true",
        "force_unroll=true",
        "monitor_step_time_deviation=false",
        "use_pathways=false",
    ],
)
def test_accepted_values_of_inert_keys(setting):
    load(None, [setting], environ={}, devices=Devices(1))


@pytest.mark.parametrize("axis", ["pipeline", "diloco"])
@pytest.mark.parametrize("network", ["ici", "dcn"])
def test_axes_that_do_not_act_are_refused(network, axis):
    key = f"{network}_{axis}_parallelism"
    assert ledger.status(key).kind == "not_yet"
    for value in (2, -1):
        with pytest.raises(
            ConfigError, match=f"{key}={value} .* would be ignored: it does not act yet"
        ):
            load(None, [f"{key}={value}"], environ={}, devices=Devices(2))


def test_reasons_name_the_right_feature():
    assert "internal" not in ledger.status("use_pathways").reason
    assert "Cloud" not in ledger.status("upload_all_profiler_results").reason
    assert "profiles" in ledger.status("upload_all_profiler_results").reason


def test_attention_alias_logs_a_warning(caplog, monkeypatch):
    monkeypatch.setattr("maxtext.common.log.LOGGER.propagate", True)
    config = load(None, ["attention=cudnn_flash_te"], environ={}, devices=Devices(1))
    assert config.attention == "cudnn_flash_jax"
    assert "attention=cudnn_flash_te is cudnn_flash_jax here" in caplog.text


def test_extras_belong_to_existing_features():
    """Every package that an extra installs is imported by the source, or is a platform of JAX."""
    import tomllib

    from maxtext.common.extras import EXTRA_OF

    project = PACKAGE.parents[1] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("an installed package")
    extras = set(tomllib.loads(project.read_text())["project"]["optional-dependencies"])
    assert extras - {"cuda12", "cuda13", "test", "tensorboard"} <= {*EXTRA_OF.values()}
    assert set(EXTRA_OF.values()) <= extras


def test_acting_keys_are_read():
    acting = {key for key in MaxTextConfig.model_fields if ledger.status(key).kind == "acts"}
    unread = acting - read_outside() - derivation_inputs() - LOADER_KEYS - FIELD_KEYS
    assert not unread, (
        f"the ledger says that these act, but no code outside configs/ reads them: {sorted(unread)}"
    )


def test_base_yml_lists_inert_keys_apart_by_reason():
    text = sources.BASE.read_text(encoding="utf-8")
    acting, computed, inert = re.split(r"^# ==== .*\n", text, flags=re.M)[1:]

    def keys(part: str) -> list[str]:
        return re.findall(r"^(\w+):", part, re.M)

    assert set(keys(inert)) == set(ledger.inert_keys())
    assert keys(computed) == list(DerivedValues.model_fields)
    assert set(keys(acting)).isdisjoint([*keys(computed), *keys(inert)])
    for section in re.split(r"\n\n(?=# ----)", inert)[1:]:
        title = " ".join(re.findall(r"^# ---- (.*)", section, re.M))
        reasons = {ledger.status(key).reason for key in keys(section)}
        assert reasons == {title.partition(": ")[2]}, title


def test_inert_keys_are_not_read():
    read = set(ledger.inert_keys()) & read_outside()
    assert not read, f"code reads these, but the ledger says that they do not act: {sorted(read)}"


def test_setting_an_inert_key_is_an_error_with_the_reason():
    with pytest.raises(
        ConfigError,
        match="gcs_metrics=True .* would be ignored: it does not act here: .*Google Cloud",
    ):
        load(None, ["gcs_metrics=true"], environ={}, devices=Devices(1))
    with pytest.raises(ConfigError, match="enable_diloco=True .*does not act yet"):
        load(None, [], environ={"M_ENABLE_DILOCO": "true"}, devices=Devices(1))


def test_an_inert_key_may_be_set_to_its_default():
    from maxtext.configs import serialize

    overrides = []
    for key in ledger.inert_keys():
        value = serialize.plain(getattr(base_values(), key))
        overrides.append(f"{key}={value if isinstance(value, str) else serialize.compact(value)}")
    config = load(None, overrides, environ={}, devices=Devices(1))
    differing = [
        key for key in ledger.inert_keys() if getattr(config, key) != getattr(base_values(), key)
    ]
    assert not differing
    assert config.source("gcs_metrics").kind == "command line"


def test_every_key_has_a_meaning():
    missing = [key for key in MaxTextConfig.model_fields if len(declaration(key).meaning) < 20]
    assert not missing


def needs(name, *overrides):
    """What a verb that runs the model would refuse."""
    config = load(None, [f"model_name={name}", *overrides], environ={}, devices=Devices(1))
    try:
        ledger.refuse_unsupported_model(config, base_values())
    except ConfigError as error:
        return str(error)
    return ""


def test_a_model_with_images_trains_on_text():
    for name in (
        "llama4-17b-16e",
        "llama4-17b-128e",
        "gemma3-4b",
        "gemma4-26b",
        "qwen3.5-397b-a17b",
    ):
        config = load(None, [f"model_name={name}"], environ={}, devices=Devices(1))
        assert config.source("hidden_size_for_vit").kind == "model"
        assert not needs(name)


def test_a_model_that_takes_images_is_refused_until_they_are_switched_off():
    refused = needs("qwen3-omni-30b-a3b")
    assert "use_multimodal=True" in refused
    assert "hidden_size_for_vit=1152" in refused
    assert not needs("qwen3-omni-30b-a3b", "use_multimodal=false", "override_model_config=true")


def test_image_keys_of_the_user_are_refused_even_for_text():
    with pytest.raises(ConfigError, match="hidden_size_for_vit=99 .*would be ignored"):
        load(None, ["hidden_size_for_vit=99"], environ={}, devices=Devices(1))
