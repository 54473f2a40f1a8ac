"""Frequencies of every kind against Transformers, at the sizes of real models."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.rotary import apply_rope
from jaxserve.models.rope import attention_factor, frequencies, rope_cos_sin
from jaxserve.models.rope_config import RopeConfig, read_partial_rope, read_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    "llama3.2": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3, "factor": 32.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, no rounding": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False,
    },
    "yarn, mscale": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 1.0, "mscale_all_dim": 0.8,
    },
    "yarn, factor given": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_frequencies_equal_those_of_transformers(name: str, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=head_dim * 32, head_dim=head_dim, max_position_embeddings=131072, rope_parameters=dict(CASES[name])
    )
    theirs = LlamaRotaryEmbedding(config)
    rope = read_rope({"max_position_embeddings": 131072, "rope_parameters": CASES[name]})
    assert attention_factor(rope) == pytest.approx(theirs.attention_scaling)
    if rope.kind != "dynamic":
        np.testing.assert_allclose(frequencies(rope, head_dim), theirs.inv_freq.numpy(), rtol=5e-7)
    positions = jnp.asarray([0, 1, 17, 1000, 30000])
    cos, sin = rope_cos_sin(positions, rope, head_dim, 131072)
    angles = np.asarray(positions, np.float32)[:, None] * theirs.inv_freq.numpy()
    np.testing.assert_allclose(cos, np.cos(angles) * theirs.attention_scaling, atol=1e-2)
    np.testing.assert_allclose(sin[:4], np.sin(angles[:4]) * theirs.attention_scaling, atol=2e-4)


def test_dynamic_scaling_begins_beyond_the_trained_length() -> None:
    plain, dynamic = RopeConfig(), RopeConfig(kind="dynamic", factor=2.0)
    positions = jnp.arange(128)
    expected, _ = rope_cos_sin(positions, plain, 16, 64)
    cos, _ = rope_cos_sin(positions, dynamic, 16, 64)
    np.testing.assert_allclose(cos[:64], expected[:64], atol=1e-5)
    assert np.abs(cos[64:] - expected[64:]).max() > 0.1


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = jnp.asarray(rng.normal(size=(2, 1, 1, 32)), jnp.float32)

    def score(q_position: int, k_position: int) -> float:
        q_rotated = apply_rope(q, *rope_cos_sin(jnp.asarray([q_position]), RopeConfig(), 32, 64))
        k_rotated = apply_rope(k, *rope_cos_sin(jnp.asarray([k_position]), RopeConfig(), 32, 64))
        np.testing.assert_allclose(jnp.linalg.norm(q_rotated), jnp.linalg.norm(q), rtol=1e-5)
        return float(jnp.sum(q_rotated * k_rotated))

    assert score(5, 2) == pytest.approx(score(45, 42), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(45, 40), abs=1e-2)


def test_rotation_keeps_the_type() -> None:
    x = jnp.ones((1, 2, 8), jnp.bfloat16)
    assert apply_rope(x, *rope_cos_sin(jnp.asarray([3]), RopeConfig(), 8, 64)).dtype == jnp.bfloat16


def rotated_as_published(x: np.ndarray, position: int, rope: RopeConfig) -> np.ndarray:
    """A head as its checkpoint orders it: pairs are complex numbers, turned by position times frequency."""
    out, size = x.copy(), rope.rotated(len(x))
    pairs = np.arange(size).reshape(-1, 2) if rope.is_interleaved else np.arange(size).reshape(2, -1).T
    turned = (x[pairs[:, 0]] + 1j * x[pairs[:, 1]]) * np.exp(1j * position * frequencies(rope, size).astype(np.float64))
    out[pairs[:, 0]], out[pairs[:, 1]] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("rotary_dim", [None, 16, 8, 0])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_are_rotated_as_published_whatever_their_pairs(rotary_dim: int | None, is_interleaved: bool) -> None:
    rope, dim = RopeConfig(theta=100.0, rotary_dim=rotary_dim, is_interleaved=is_interleaved), 24
    order = [place for part in rope.head_order(dim) for place in part]
    assert sorted(order) == list(range(dim))
    x = np.random.default_rng(0).normal(size=dim)
    ours = apply_rope(jnp.asarray(x[order], jnp.float32)[None, None], *rope_cos_sin(jnp.asarray([7]), rope, dim, 64))
    np.testing.assert_allclose(ours[0, 0], rotated_as_published(x, 7, rope)[order], atol=1e-5)


def test_heads_that_are_rotated_whole_keep_their_order() -> None:
    assert RopeConfig().head_order(16) == RopeConfig(rotary_dim=0).head_order(16) == (range(16),)
    assert RopeConfig(is_interleaved=True).head_order(8) == (range(0, 8, 2), range(1, 8, 2))
    assert RopeConfig(rotary_dim=4).head_order(8) == (range(2), range(4, 6), range(2, 4), range(6, 8))


def test_only_what_is_rotated_is_stretched() -> None:
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_len=64, rotary_dim=8)
    cos, sin = rope_cos_sin(jnp.asarray([0, 3]), rope, 24, 64)
    assert cos.shape == (2, 12)
    np.testing.assert_array_equal(cos[:, 4:], 1)
    np.testing.assert_array_equal(sin[:, 4:], 0)
    np.testing.assert_allclose(cos[0, :4], attention_factor(rope))


def test_part_of_a_head_is_read() -> None:
    raw = {"partial_rotary_factor": 0.75, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0}
    assert read_partial_rope(raw, 32) == RopeConfig(theta=500.0, kind="linear", factor=2.0, rotary_dim=24)
    assert read_partial_rope({"rope_parameters": {"partial_rotary_factor": 0.5}}, 32).rotary_dim == 16
    assert read_partial_rope({}, 32, default=0.25).rotary_dim == 8
    assert read_partial_rope({}, 32) == RopeConfig()
    with pytest.raises(ValueError, match="partial_rotary_factor must be above 0 and at most 1, got 2"):
        read_partial_rope({"partial_rotary_factor": 2}, 32)
    with pytest.raises(ValueError, match="must be an even number, got 3"):
        read_partial_rope({"partial_rotary_factor": 0.1}, 32)


def long_rope(**params: Any) -> dict[str, Any]:
    """Of config.json, at the sizes of Phi-3.5: heads of 96."""
    factors = {"short_factor": [1 + 0.05 * pair for pair in range(48)], "long_factor": [1.1 + 1.3 * pair for pair in range(48)]}
    return {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", **factors, **params},
    }


@pytest.mark.parametrize("params", [{}, {"attention_factor": 1.25}, {"factor": 8.0}])
@pytest.mark.parametrize(("context_len", "seq_len"), [(4096, 4096), (4097, 4097), (131072, 4097)])
def test_long_rope_equals_that_of_transformers(params: dict[str, Any], context_len: int, seq_len: int) -> None:
    """A server's longest sequence decides, as a sequence's own length does in Transformers."""
    import torch
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    raw = long_rope(**params)
    scaling = {**raw["rope_scaling"], "original_max_position_embeddings": 4096}
    theirs = Phi3RotaryEmbedding(Phi3Config(**{**raw, "rope_scaling": scaling}))
    expected = theirs(torch.ones(1), torch.arange(seq_len)[None])
    rope = read_rope(raw).for_context(context_len)
    assert rope.extended_len(131072) == 131072
    assert attention_factor(rope) == pytest.approx(theirs.attention_scaling)
    found = rope_cos_sin(jnp.arange(seq_len), rope, 96, 131072)
    for ours, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, other[0, :, :48].numpy(), atol=2e-3)


def test_long_rope_is_read() -> None:
    raw = long_rope(short_mscale=1.1, long_mscale=1.3)
    rope = read_rope(raw)
    assert (rope.kind, rope.factor, rope.original_max_len, len(rope.short_factor)) == ("longrope", 32.0, 4096, 48)
    assert [attention_factor(rope.for_context(context_len)) for context_len in (100, 4096, 4097)] == [1.1, 1.1, 1.3]
    assert read_rope({**raw, "rope_scaling": {**raw["rope_scaling"], "type": "su"}}) == rope
    assert attention_factor(read_rope({**long_rope(), "max_position_embeddings": 4096})) == 1.0


@pytest.mark.parametrize(("changes", "words"), [
    ({"long_factor": None}, "needs long_factor, a list of numbers above 0; got None"),
    ({"short_factor": [1.0, -1.0]}, r"needs short_factor, a list of numbers above 0; got \[1.0, -1.0\]"),
    ({"type": "su", "long_factor": "x"}, "needs long_factor, a list of numbers above 0; got 'x'"),
])  # fmt: skip
def test_long_rope_without_its_numbers(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_rope(long_rope(**changes))


def test_long_rope_of_other_heads() -> None:
    rope = read_rope(long_rope())
    rope.check_head(96)
    with pytest.raises(ValueError, match=r"short_factor must have a number for each pair of the 64 .* 32; got 48"):
        rope.check_head(64)
    with pytest.raises(ValueError, match="original_max_position_embeddings must be a whole number of at least 2, got 1"):
        read_rope({**long_rope(), "original_max_position_embeddings": 1})
