"""Which requests attention back ends support, which one is selected, the log and the errors."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.kernels.attention import (
    BACKENDS,
    AttentionMask,
    AttentionRequest,
    BlockSizes,
    attend,
    fastest_backend,
    try_backends,
)
from maxtext.kernels.attention.dispatch import autoselect

SCALE = 0.3
GPU = AttentionRequest("gpu", "bfloat16", 256, 256, 8, 2, 128, 128, capability="9.0")
TPU = replace(GPU, platform="tpu", capability="")
CPU = replace(TPU, platform="cpu")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"platform": "cpu"}, "needs a GPU"),
        ({"dtype": "float32"}, "float32"),
        ({"head_dim": 264}, "head dim"),
        ({"head_dim": 100, "v_head_dim": 100}, "head dim"),
        ({"head_dim": 192, "capability": "8.0"}, "up to 128"),
        ({"head_dim": 192, "capability": "10.0"}, "up to 128"),
        ({"capability": "7.5"}, "7.5"),
        ({"capability": "gfx942"}, "NVIDIA"),
        ({"soft_cap": 50.0}, "soft cap"),
        ({"has_sinks": True}, "sinks"),
        ({"has_selection": True}, "selection"),
        ({"custom_positions": True}, "positions"),
        (
            {"custom_positions": True, "has_segments": True, "mask": AttentionMask(chunk=64)},
            "no chunks",
        ),
        ({"q_length": 128}, "128 and 256"),
        ({"q_length": 1, "mask": AttentionMask(causal=False)}, "single query"),
        ({"mask": AttentionMask(chunk=100)}, "chunks of 100"),
        ({"has_segments": True, "q_length": 255, "k_length": 255}, "even"),
    ],
)
def test_requests_that_cudnn_does_not_support_use_dot_product(change, word):
    request = replace(GPU, **change)
    assert word in BACKENDS["cudnn_flash_jax"].unsupported_reason(request)
    assert fastest_backend(request) == "dot_product"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float16"},
        {"head_dim": 256, "v_head_dim": 256},
        {"head_dim": 192},  # MLA
        {"mask": AttentionMask(window=64)},
        {"mask": AttentionMask(chunk=64)},
        {"mask": AttentionMask(causal=False), "q_length": 128},
        {"has_segments": True},
        {"has_segments": True, "custom_positions": True, "q_length": 128},  # a chunk, its cache
        {"capability": ""},
    ],
)
def test_requests_that_cudnn_supports_use_it(change):
    assert fastest_backend(replace(GPU, **change)) == "cudnn_flash_jax"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"platform": "gpu"}, "needs a TPU"),
        ({"platform": "cpu"}, "needs a TPU"),
        ({"dtype": "float16"}, "float16"),
        ({"q_length": 200, "k_length": 200}, "multiples of 128"),
        ({"has_selection": True}, "selection"),
        ({"custom_positions": True}, "positions"),
        ({"q_length": 128}, "128 and 256"),
    ],
)
def test_requests_that_flash_does_not_support(change, word):
    request = replace(TPU, **change)
    assert word in BACKENDS["flash"].unsupported_reason(request)
    assert fastest_backend(request) != "flash"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float32"},
        {
            "soft_cap": 50.0,
            "has_sinks": True,
            "has_segments": True,
            "mask": AttentionMask(chunk=100),
        },
        {"head_dim": 192},
        {"mask": AttentionMask(causal=False), "q_length": 128},
    ],
)
def test_requests_that_flash_supports_use_it(change):
    assert fastest_backend(replace(TPU, **change)) == "flash"


def test_cpu_uses_dot_product_which_supports_everything():
    assert fastest_backend(CPU) == "dot_product"
    anything = replace(
        CPU,
        dtype="float64",
        q_length=7,
        custom_positions=True,
        soft_cap=1.0,
        has_sinks=True,
        has_selection=True,
    )
    assert BACKENDS["dot_product"].unsupported_reason(anything) is None


def arrays(length=12, q_heads=4, k_heads=2, head_dim=8):
    draw = np.random.default_rng(0).normal
    return [
        jnp.asarray(draw(size=(2, length, heads, head_dim)), jnp.float32)
        for heads in (q_heads, k_heads, k_heads)
    ]


@pytest.mark.parametrize("backend", ["flash", "cudnn_flash_jax"])
def test_unsupported_named_backend_raises_with_an_alternative(backend):
    with pytest.raises(ConfigError) as caught:
        attend(*arrays(), backend=backend, mask=AttentionMask(), scale=SCALE, platform="cpu")
    (sentence,) = caught.value.problems
    assert backend in sentence
    assert "use dot_product or autoselected" in sentence


def test_error_names_the_fastest_backend_of_the_platform():
    with pytest.raises(ConfigError, match="use flash or autoselected"):
        attend(
            *arrays(length=128),
            backend="cudnn_flash_jax",
            mask=AttentionMask(),
            scale=SCALE,
            platform="tpu",
        )


@pytest.mark.parametrize(("backend", "platform"), [("flash", "tpu"), ("cudnn_flash_jax", "gpu")])
def test_selection_of_keys_is_supported_by_dot_product_only(backend, platform):
    q, k, v = (array.astype(jnp.bfloat16) for array in arrays(length=128))
    selected = jnp.ones((2, 1, 128, 128), bool)
    with pytest.raises(ConfigError) as caught:
        attend(
            q,
            k,
            v,
            backend=backend,
            mask=AttentionMask(),
            scale=SCALE,
            platform=platform,
            selected=selected,
        )
    (sentence,) = caught.value.problems
    assert sentence == (
        f"Attention back end {backend} cannot do this: it takes no selection of keys; "
        "use dot_product or autoselected."
    )
    assert (
        fastest_backend(replace(TPU if platform == "tpu" else GPU, has_selection=True))
        == "dot_product"
    )


def test_unknown_backend_lists_the_names():
    with pytest.raises(ConfigError, match="dot_product, flash, cudnn_flash_jax"):
        attend(*arrays(), backend="flesh", mask=AttentionMask(), scale=SCALE)


def test_autoselected_computes_and_logs_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("maxtext"), "propagate", True)
    q, k, v = arrays(length=13)  # a length that no other test uses
    options = {"mask": AttentionMask(), "scale": SCALE, "platform": "cpu"}
    with caplog.at_level(logging.INFO, logger="maxtext"):
        output = attend(q, k, v, backend="autoselected", **options)
        attend(q, k, v, backend="autoselected", **options)
    np.testing.assert_array_equal(output, attend(q, k, v, backend="dot_product", **options))
    assert [record.message.split(" for ")[0] for record in caplog.records] == [
        "attention: dot_product on cpu"
    ]


def test_log_gives_the_reason_against_the_faster_backend(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("maxtext"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="maxtext"):
        assert autoselect(replace(GPU, soft_cap=49.0)) == "dot_product"
    assert "not cudnn_flash_jax: it has no soft cap" in caplog.text


def test_window_or_chunk_that_covers_the_row_is_causal(monkeypatch):
    masks = []
    monkeypatch.setitem(
        BACKENDS,
        "dot_product",
        replace(BACKENDS["dot_product"], run=lambda inputs: masks.append(inputs.mask)),
    )
    for mask in (AttentionMask(window=12), AttentionMask(chunk=12), AttentionMask(window=11)):
        attend(*arrays(), backend="dot_product", mask=mask, scale=SCALE)
    assert masks == [AttentionMask(), AttentionMask(), AttentionMask(window=11)]


@pytest.mark.parametrize(
    "options",
    [{"causal": False, "window": 3}, {"window": 3, "chunk": 4}, {"window": 0}, {"chunk": -1}],
)
def test_invalid_masks_raise(options):
    with pytest.raises(ConfigError):
        AttentionMask(**options)


@pytest.mark.parametrize("options", [{"q": 64}, {"kv_layout": "x"}, {"k_layout": "ROW_MAJOR"}])
def test_invalid_block_sizes_raise(options):
    with pytest.raises((ConfigError, TypeError)):
        BlockSizes(**options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sinks": np.zeros(3)}, "sinks"),
        ({"q_segments": np.zeros((2, 3), np.int32)}, "q_segments"),
        ({"k_segments": np.zeros((2, 12), np.int32)}, "need q_segments"),
        ({"q_positions": np.zeros((1, 12), np.int32)}, "q_positions"),
        ({"selected": np.ones((2, 12, 12), bool)}, "selected"),
        ({"selected": np.ones((2, 2, 12, 12), bool)}, "selected"),  # by key/value head
        ({"selected": np.ones((2, 1, 12, 12), np.int32)}, "selected must be booleans"),
    ],
)
def test_mismatched_shapes_raise(options, word):
    with pytest.raises(ValueError, match=word):
        attend(*arrays(), backend="dot_product", mask=AttentionMask(), scale=SCALE, **options)
    with pytest.raises(ValueError, match="multiple"):
        attend(*arrays(q_heads=3), backend="dot_product", mask=AttentionMask(), scale=SCALE)


def test_try_backends_runs_every_backend():
    results = dict(try_backends())
    assert set(results) == set(BACKENDS)
    assert results["dot_product"] == "works"
    if jax.default_backend() == "cpu":
        assert results["flash"] == "not here: it needs a TPU"
        assert results["cudnn_flash_jax"] == "not here: it needs a GPU"
