"""The configuration of a model for inference."""

import pytest

from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.inference.loading import resolve_config


@pytest.mark.parametrize("network", ["ici", "dcn"])
@pytest.mark.parametrize("layer", ["overrides", "environment", "file"])
def test_context_autoregressive_splits_caches_wherever_it_is_set(
    layer, network, monkeypatch, tmp_path
):
    devices = Devices(2, 1 if network == "ici" else 2)
    monkeypatch.setattr("maxtext.configs.derive.visible_devices", lambda hardware: devices)
    key, overrides, path = f"{network}_context_autoregressive_parallelism", [], None
    if layer == "overrides":
        overrides = [f"{key}=2", "logical_axis_rules=[[cache_heads, [tensor]]]"]
    elif layer == "environment":
        monkeypatch.setenv(f"M_{key.upper()}", "2")
    else:
        path = tmp_path / "own.yml"
        path.write_text(f"{key}: 2\n")
    rules = dict(resolve_config(from_overrides(overrides), path=path).logical_axis_rules)
    assert rules["cache_sequence"] == ["context_autoregressive"]
    assert rules["cache_heads"] == (
        ["tensor"] if overrides else ["autoregressive", "tensor", "tensor_sequence"]
    )


def test_rules_of_the_user_for_caches_win(monkeypatch, tmp_path):
    monkeypatch.setattr("maxtext.configs.derive.visible_devices", lambda hardware: Devices(4))
    overrides = from_overrides(
        ["ici_context_autoregressive_parallelism=2", "ici_tensor_parallelism=2",
         "logical_axis_rules=[[cache_sequence, [tensor, context_autoregressive]]]"]
    )  # fmt: skip
    rules = dict(resolve_config(overrides).logical_axis_rules)
    assert rules["cache_sequence"] == ["tensor", "context_autoregressive"]
