"""Every group, key, type, default and choice is the published one."""

import json
import typing
from enum import Enum
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from maxtext.configs import fields, types
from maxtext.configs.load import base_values
from maxtext.configs.types import GROUPS
from tests.support.added_keys import ADDED_KEYS

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "spec" / "config_keys.json"
PUBLISHED = json.loads((HERE / "published_keys.json").read_text())
# The published default of the cache folder is the home of the machine that listed the keys.
HOME_DEFAULTS = {"jax_cache_dir": "~/jax_cache"}
# Filled by base.yml; the type's own default is empty.
BASE_ONLY = {"logical_axis_rules", "data_sharding"}


def type_text(field) -> str:
    """A type as the published list spells it: constraints as Annotated[…], choices and classes by
    name.
    """

    def spell(part) -> str:
        if part is type(None):
            return "None"
        if isinstance(part, type) and not hasattr(part, "__origin__"):
            return part.__name__
        text = str(part).replace("typing.", "").replace("NoneType", "None")
        return text.replace("annotated_types.", "")

    if fields.is_union(field.annotation):
        text = " | ".join(spell(part) for part in typing.get_args(field.annotation))
    else:
        text = spell(field.annotation)
    for bound in field.metadata:
        text = f"Annotated[{text}, {bound!r}]"
    return text


def default_text(field):
    if field.default is PydanticUndefined:
        return "<factory>"
    if isinstance(field.default, types.DecoderBlockType | types.ShardMode):
        return field.default.value
    if isinstance(field.default, Enum):
        return str(field.default)
    return field.default


def described():
    return {
        group.__name__: {
            key: [type_text(group.model_fields[key]), default_text(group.model_fields[key])]
            for key in group.model_fields
        }
        for group in GROUPS
    }


@pytest.mark.parametrize("group", PUBLISHED["groups"])
def test_group(group):
    expected = {key: list(fact) for key, fact in PUBLISHED["groups"][group].items()}
    for key, default in HOME_DEFAULTS.items():
        if key in expected:
            expected[key][1] = default
    actual = described()[group]
    if group == "RunInfo":  # may name further models
        names = typing.get_args(types.RunInfo.model_fields["model_name"].annotation)
        published = [name for name in names if f"'{name}'" in expected["model_name"][0]]
        actual["model_name"][0] = f"Literal{published}"
    if group == "Quantization":  # may have further formats of caches
        choices = actual["kv_quant_dtype"][0]
        actual["kv_quant_dtype"][0] = choices.replace(", 'fp8'", "")
    assert actual == expected


def test_no_further_groups_or_keys():
    assert [group for group in described() if group not in ADDED_KEYS] == list(PUBLISHED["groups"])
    assert {group: list(described()[group]) for group in ADDED_KEYS} == ADDED_KEYS
    assert len(types.MaxTextConfig.model_fields) == 723 + sum(map(len, ADDED_KEYS.values()))


@pytest.mark.parametrize("name", PUBLISHED["enums"])
def test_choices(name):
    choices = {member.name: member.value for member in getattr(types, name)}
    if name in ("DecoderBlockType", "QuantizationType"):  # may have further members
        choices = {key: choices[key] for key in PUBLISHED["enums"][name]}
    assert choices == PUBLISHED["enums"][name]


@pytest.mark.skipif(not SHARED.exists(), reason="the published list is not beside this checkout")
def test_fixture_is_the_published_list():
    published = json.loads(SHARED.read_text())
    groups = {
        name: {key: [fact["type"], fact["default"]] for key, fact in group["fields"].items()}
        for name, group in published["groups"].items()
    }
    assert {"enums": published["enums"], "groups": groups} == PUBLISHED


def test_base_file_has_every_key_with_the_default_of_its_type():
    bare = types.Settings()
    base = base_values()
    differing = {
        key for key in types.Settings.model_fields if getattr(bare, key) != getattr(base, key)
    }
    assert differing == BASE_ONLY
    assert all(base.source(key).line for key in types.Settings.model_fields)


def test_derived_values_keep_the_order_of_their_keys():
    assert list(types.MaxTextConfig.model_fields) == list(types.Settings.model_fields)
