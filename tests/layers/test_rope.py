"""RoPE against transformers' frequencies and rotation, and against rotation of complex numbers in
float64.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from maxtext.layers.rope import apply_rope, frequencies
from maxtext.layers.specs import RopeSpec

HEAD = 64
LLAMA31 = {"rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}

# name: (our spec, transformers' rope_parameters). The original length is 4096 throughout.
KINDS = {
    "linear": (
        RopeSpec(linear_factor=8.0, max_timescale=1e6),
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    ),
    "llama3.1": (
        RopeSpec("llama3.1", max_timescale=500_000.0, factor=8.0, original_length=4096),
        dict(rope_type="llama3", **LLAMA31),
    ),
    "llama3.1 wider band": (
        RopeSpec("llama3.1", max_timescale=500_000.0, factor=8.0, original_length=4096,
                 low_frequency_factor=0.5,
                 high_frequency_factor=16.0),
        dict(rope_type="llama3", **(LLAMA31 | {"low_freq_factor": 0.5, "high_freq_factor": 16.0})),
    ),
    "yarn": (
        RopeSpec("yarn", max_timescale=150_000.0, factor=32.0, original_length=4096,
                 attention_scaling=True),
        dict(rope_type="yarn", **YARN),
    ),
    "yarn untruncated": (
        RopeSpec("yarn", max_timescale=150_000.0, factor=32.0, original_length=4096,
                 attention_scaling=True,
                 truncate=False),
        dict(rope_type="yarn", truncate=False, **YARN),
    ),
    "yarn without attention scaling": (
        RopeSpec("yarn", max_timescale=150_000.0, factor=32.0, original_length=4096),
        dict(rope_type="yarn", attention_factor=1.0, **YARN),
    ),
    "yarn other betas": (
        RopeSpec("yarn", max_timescale=1e4, factor=4.0, original_length=4096,
                 attention_scaling=True, beta_fast=8.0,
                 beta_slow=0.5),
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5},
    ),
    "yarn whose range ends past the last pair": (
        RopeSpec("yarn", max_timescale=24.0, factor=32.0, original_length=4096,
                 attention_scaling=True),
        {"rope_type": "yarn", **(YARN | {"rope_theta": 24.0})},
    ),
    "half of the head, yarn": (
        RopeSpec("yarn", max_timescale=150_000.0, factor=32.0, original_length=4096,
                 attention_scaling=True,
                 fraction=0.5),
        dict(rope_type="yarn", partial_rotary_factor=0.5, **YARN),
    ),
    "a quarter of the head, llama3.1": (
        RopeSpec("llama3.1", max_timescale=500_000.0, factor=8.0, original_length=4096,
                 fraction=0.25),
        dict(rope_type="llama3", partial_rotary_factor=0.25, **LLAMA31),
    ),
}  # fmt: skip


def hf_config(parameters):
    if parameters["rope_type"] in ("llama3", "yarn"):
        parameters = dict(parameters, original_max_position_embeddings=4096)
    return LlamaConfig(
        hidden_size=4 * HEAD, num_attention_heads=4, head_dim=HEAD, max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_and_magnitude_of_transformers(name):
    spec, parameters = KINDS[name]
    expected, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf_config(parameters))
    actual = frequencies(spec, HEAD)
    assert actual.shape == (spec.rotated(HEAD) // 2,)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=2e-6)  # the reference is in float32
    assert spec.magnitude == pytest.approx(magnitude, rel=1e-7)


def test_the_kinds_differ_where_they_should():
    """A comparison of equals would say nothing: each kind changes some frequency, each option
    changes it further.
    """
    found = {
        name: frequencies(spec, HEAD)
        for name, (spec, _) in KINDS.items()
        if spec.rotated(HEAD) == HEAD
    }
    plain = frequencies(RopeSpec(max_timescale=500_000.0), HEAD)
    assert np.abs(found["llama3.1"] / plain - 1).max() > 0.5
    assert np.abs(found["yarn"] / found["yarn untruncated"] - 1).max() > 1e-3
    assert np.abs(found["llama3.1"] / found["llama3.1 wider band"] - 1).max() > 1e-2


def test_default_frequencies():
    """theta^(-2i/D), and with a shortest timescale the geometric sequence from it to theta."""
    np.testing.assert_allclose(
        frequencies(RopeSpec(max_timescale=1e4), 8), [1, 1e-1, 1e-2, 1e-3], rtol=1e-12
    )
    np.testing.assert_allclose(
        frequencies(RopeSpec(min_timescale=2.0, max_timescale=512.0), 8),
        [1 / 2, 1 / 8, 1 / 32, 1 / 128],
        rtol=1e-12,
    )
    np.testing.assert_allclose(
        frequencies(RopeSpec(fraction=0.25), 16), [1, 1e-2], rtol=1e-12
    )  # 4 dimensions turn


def test_llama31_leaves_fast_pairs_and_divides_slow_ones():
    """The published rule: wavelengths below original/high are kept, above original/low divided by
    the factor.
    """
    plain = frequencies(RopeSpec(max_timescale=500_000.0), 128)
    actual = frequencies(
        RopeSpec("llama3.1", max_timescale=500_000.0, factor=8.0, original_length=8192), 128
    )
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(
        actual[wavelength < 8192 / 4], plain[wavelength < 8192 / 4], rtol=1e-12
    )
    np.testing.assert_allclose(actual[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-12)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.any()
    assert np.all((actual[between] <= plain[between]) & (actual[between] >= plain[between] / 8))


def random_heads(head=HEAD, dtype=np.float32):
    draw = np.random.default_rng(0)
    return draw.normal(size=(2, 7, 3, head)).astype(dtype), draw.integers(0, 5000, (2, 7)).astype(
        np.int32
    )


@pytest.mark.parametrize("name", ["default", "linear", "llama3.1", "yarn"])
def test_rotation_of_transformers(name):
    spec, parameters = KINDS.get(name, (RopeSpec(), {"rope_type": "default", "rope_theta": 1e4}))
    x, positions = random_heads()
    rotary = LlamaRotaryEmbedding(hf_config(parameters))
    reference = torch.tensor(x)
    cos, sin = rotary(reference, torch.tensor(positions))
    expected, _ = apply_rotary_pos_emb(reference, reference, cos, sin, unsqueeze_dim=2)
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x), jnp.asarray(positions), spec), expected, atol=2e-3
    )
    near = positions % 50  # far positions lose digits of the angle in float32, near ones do not
    cos, sin = rotary(reference, torch.tensor(near))
    expected, _ = apply_rotary_pos_emb(reference, reference, cos, sin, unsqueeze_dim=2)
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x), jnp.asarray(near), spec), expected, atol=2e-5
    )


def turned(x, positions, spec):
    """Each pair is a complex number, multiplied by magnitude * e^(i * position * frequency); in
    float64.
    """
    size = int(x.shape[-1] * spec.fraction)
    angles = positions[:, :, None, None] * frequencies(spec, x.shape[-1])
    head, rest = x[..., :size].astype(np.float64), x[..., size:]
    if spec.interleave:
        pairs = (head[..., 0::2] + 1j * head[..., 1::2]) * np.exp(1j * angles) * spec.magnitude
        joined = np.stack([pairs.real, pairs.imag], axis=-1).reshape(head.shape)
    else:
        pairs = (
            (head[..., : size // 2] + 1j * head[..., size // 2 :])
            * np.exp(1j * angles)
            * spec.magnitude
        )
        joined = np.concatenate([pairs.real, pairs.imag], axis=-1)
    return np.concatenate([joined, rest], axis=-1)


@pytest.mark.parametrize("interleave", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rotation_as_complex_numbers(interleave, fraction, kind):
    spec = RopeSpec(
        kind, fraction=fraction, interleave=interleave, factor=4.0, attention_scaling=True
    )
    x, positions = random_heads(head=16)
    positions = positions % 50
    actual = np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(positions), spec))
    np.testing.assert_allclose(actual, turned(x, positions, spec), atol=2e-5)
    np.testing.assert_array_equal(actual[..., int(16 * fraction) :], x[..., int(16 * fraction) :])


def test_interleaved_products_of_deepseek():
    """DeepSeek's rotation gives the evens first, then the odds: another order, the same products of
    q and k.
    """
    x, positions = random_heads(head=16)
    positions = positions % 50
    spec = RopeSpec(interleave=True)
    angles = torch.tensor(positions[..., None] * frequencies(spec, 16)).float()
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    q, k = torch.tensor(x), torch.tensor(x[..., ::-1].copy())
    q, k = apply_rotary_pos_emb_interleave(q, k, cos, sin, unsqueeze_dim=2)
    actual = [
        apply_rope(jnp.asarray(one), jnp.asarray(positions), spec) for one in (x, x[..., ::-1])
    ]
    np.testing.assert_allclose(
        np.einsum("bshd,bthd->bhst", *map(np.asarray, actual)),
        torch.einsum("bshd,bthd->bhst", q, k),
        atol=2e-4,
    )


def test_bfloat16_heads_turn_in_float32():
    x, positions = random_heads(head=16)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    actual = apply_rope(jnp.asarray(x), jnp.asarray(positions % 50), RopeSpec())
    assert actual.dtype == jnp.bfloat16
    expected = turned(x.astype(np.float64), positions % 50, RopeSpec())
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=2**-8, atol=2e-5
    )  # one rounding, at the end
