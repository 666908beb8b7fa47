"""Facts under `architecture:`: what a checkpoint fixes and no key names, and who may say
otherwise.
"""

import contextlib
import io

import pytest

from maxtext.cli.main import main
from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.models.registry import layers

FILE = """base_config: base.yml
base_num_decoder_layers: 3
sliding_window_size: 8
decoder_block: gemma3
architecture:
  layer_kinds: [full, sliding, full]
  softmax_scale: 0.25
  rope: {full: {max_timescale: 50.5}, sliding: {max_timescale: 7.25}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.yml"
    path.write_text(FILE)
    return path


def attentions(path, *overrides):
    return [
        layer.attention for layer in layers(load(path, overrides, environ={}, devices=Devices(1)))
    ]


def test_attributes_reach_the_layers(file):
    specs = attentions(file)
    assert [spec.mask.window for spec in specs] == [None, 8, None]
    assert [spec.rope.max_timescale for spec in specs] == [50.5, 7.25, 50.5]
    assert {spec.scale for spec in specs} == {0.25}


def test_a_key_overrides_an_attribute(file):
    """Only over the facts that it says: the others stay."""
    specs = attentions(file, "rope_max_timescale=300")
    assert specs[0].rope.max_timescale == 300
    assert {spec.scale for spec in specs} == {0.25}
    assert (
        attentions(file, "rope_max_timescale=10000")[0].rope.max_timescale == 50.5
    )  # which is no other than before


def test_attributes_round_trip_through_a_file(file, tmp_path):
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        assert main(["config", str(file), "--changed", "--format", "yaml"]) == 0
    again = tmp_path / "again.yml"
    again.write_text(written.getvalue())
    assert attentions(again) == attentions(file)


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ("{layer_kind: [full]}", "architecture .*model.yml:5.* does not fit: layer_kind: Extra"),
        (
            "{layer_kinds: [full, sideways, full]}",
            "does not fit: layer_kinds.1: Input should be 'full'",
        ),
        ("[1, 2]", "does not fit"),
    ],
)
def test_invalid_attributes_are_refused(tmp_path, facts, sentence):
    path = tmp_path / "model.yml"
    path.write_text(FILE[: FILE.index("architecture")] + f"architecture: {facts}\n")
    with pytest.raises(ConfigError, match=sentence):
        load(path, [], environ={}, devices=Devices(1))


def test_a_list_of_the_wrong_length_is_refused(file):
    with pytest.raises(
        ConfigError, match="architecture.layer_kinds lists 3 layers and the model has 5"
    ):
        attentions(file, "base_num_decoder_layers=5")
