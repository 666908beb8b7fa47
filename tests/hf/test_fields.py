"""Fields of config.json: a declaration that reads and writes."""

from types import SimpleNamespace

import pytest

from maxtext.common.errors import UserError
from maxtext.hf.config_json import Field, FieldGroup, HfMapping, ModelSettings, or_zero
from maxtext.models.hf_registry import MAPPINGS

MAPPING = HfMapping(
    architectures=("TinyForCausalLM",),
    model_type="tiny",
    keys={"decoder_block": "tiny", "attention_bias": False},
    fields=(
        Field("width", "base_emb_dim", 64, aliases=("d_model",)),
        Field("inner", ("base_mlp_dim", "base_moe_mlp_dim"), null=lambda e: 4 * e["width"]),
        Field("window", "sliding_window_size", None, to_native=or_zero),
        Field("scale", "architecture.logit_scale", 0.5),
        Field("alpha", supported=(1.7,)),
        FieldGroup(
            (Field("first", default=2), Field("last", default=3)),
            lambda entries: ModelSettings({"engram_layers": [entries["first"], entries["last"]]}),
            lambda config, layers: {"first": layers[0], "last": layers[-1]},
        ),
    ),
    rules=lambda config, layers: [],
)


def test_reads_stated_entries_aliases_defaults_and_what_null_stands_for():
    settings = MAPPING.read({"d_model": 8, "width": 7, "inner": None, "first": 5, "other": 1})
    assert settings.keys == {
        "decoder_block": "tiny",
        "attention_bias": False,
        "base_emb_dim": 8,  # the alias counts
        "base_mlp_dim": 32,
        "base_moe_mlp_dim": 32,
        "sliding_window_size": 0,
        "engram_layers": [5, 3],
    }
    assert settings.hf_attributes == {"logit_scale": 0.5}


def test_writes_derived_sizes_and_groups_but_no_entry_without_a_key():
    config = SimpleNamespace(
        emb_dim=8,
        moe_mlp_dim=20,
        sliding_window_size=5,
        architecture=SimpleNamespace(logit_scale=0.25),
    )
    assert MAPPING.write(config, [1, 9]) == {
        "width": 8,
        "inner": 20,
        "window": 5,
        "scale": 0.25,
        "first": 1,
        "last": 9,
    }


def test_null_without_a_meaning_is_missing():
    with pytest.raises(KeyError, match="width"):
        MAPPING.read({"width": None})


def test_unsupported_value_is_refused():
    with pytest.raises(UserError, match=r"alpha=1\.5 is not supported, only 1\.7"):
        MAPPING.read({"alpha": 1.5})
    with pytest.raises(UserError, match="is_causal=false"):
        MAPPING.read({"is_causal": False})


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: mapping.model_type)
def test_default_of_a_field_is_written_as_it_was_read(mapping):
    for field in mapping.entries.values():
        if field.keys and field.default is not None:
            assert field.to_hf(field.native_value(field.default)) == field.default, field.hf
