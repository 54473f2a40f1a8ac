"""What layer specs can say beyond the four first families, all at once, against the formulas written down in NumPy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dense_model import logits_of, mesh_of, prompt

from jaxserve.models import DenseMLPSpec, LayerSpec, ModelConfig, NormSpec, RopeConfig, SelfAttentionSpec, load_params

NORM = NormSpec(eps=1e-5, counts_from_one=True)
LOCAL = LayerSpec(
    mixer=SelfAttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=8, scale=0.2, window=3, soft_cap=5.0, qk_norm=NORM, rope=RopeConfig(theta=100.0)
    ),
    mlp=DenseMLPSpec(intermediate_size=24, act="relu"),
    norm=NORM,
    norms_outputs=True,
)
WHOLE = dataclasses.replace(
    LOCAL, mixer=dataclasses.replace(LOCAL.mixer, window=None, sinks=True, soft_cap=None, rope=RopeConfig(theta=5000.0))
)
CONFIG = ModelConfig(
    architecture="MadeUp",
    vocab_size=30,
    hidden_size=16,
    max_position_embeddings=64,
    layers=(LOCAL, WHOLE, LOCAL),
    final_norm=NORM,
    embedding_scale=3.0,
    logit_soft_cap=2.0,
    tie_word_embeddings=True,
)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + NORM.eps) * (1 + weight)


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """[T, D] as D / 2 complex numbers, turned by position times frequency."""
    half = x.shape[1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(np.arange(len(x)), theta ** (-np.arange(half) / half)))
    return np.concatenate([turned.real, turned.imag], axis=1)


def attention(x: np.ndarray, spec: SelfAttentionSpec, arrays: Any) -> np.ndarray:
    columns = (x @ arrays["qkv"].matrix).reshape(len(x), spec.num_kv_heads, spec.group_size + 2, spec.head_dim)
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    is_visible = (distance >= 0) & (distance < (spec.window or len(x)))
    heads = []
    for head in range(spec.num_heads):
        group, place = divmod(head, spec.group_size)
        q = rotated(normed(columns[:, group, place], arrays["q_norm"]), spec.rope.theta)
        k = rotated(normed(columns[:, group, -2], arrays["k_norm"]), spec.rope.theta)
        scores = q @ k.T * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
        weights = np.where(is_visible, np.exp(scores), 0)
        sink = np.exp(arrays["sinks"][head]) if spec.sinks else 0
        heads.append(weights / (weights.sum(axis=1, keepdims=True) + sink) @ columns[:, group, -1])
    return np.concatenate(heads, axis=1) @ arrays["o"].matrix


def mlp(x: np.ndarray, arrays: Any) -> np.ndarray:
    gate, up = np.split(x @ arrays["gate_up"].matrix, 2, axis=1)
    return np.maximum(gate, 0) * up @ arrays["down"].matrix


def formulas(params: Any, ids: list[int]) -> np.ndarray:
    x = params["embed"][ids] * CONFIG.embedding_scale
    for spec, layer in zip(CONFIG.layers, params["layers"].values(), strict=True):
        out = attention(normed(x, layer["attn_norm"]), spec.mixer, layer["attn"])
        x = x + normed(out, layer["attn_out_norm"])
        x = x + normed(mlp(normed(x, layer["mlp_norm"]), layer["mlp"]), layer["mlp_out_norm"])
    logits = normed(x, params["final_norm"]) @ params["embed"].T
    return 2.0 * np.tanh(logits / 2.0)


def widened(params: Any) -> Any:
    """Norms and sinks that matter: dummy weights are nearly 0 there."""
    return jax.tree.map(lambda array: array * 10 if array.ndim == 1 else array, params)


def test_every_option_at_once() -> None:
    ids = prompt(12, CONFIG.vocab_size)
    params = load_params(Path("nowhere"), CONFIG, mesh_of(1), jnp.float32, "dummy", progress=False)
    params = widened(params)
    expected = formulas(jax.tree.map(lambda array: np.asarray(array, np.float64), params), ids)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(logits_of(params, CONFIG, ids), expected, atol=2e-5)
    halves = widened(load_params(Path("nowhere"), CONFIG, mesh_of(2), jnp.float32, "dummy", progress=False))
    np.testing.assert_allclose(logits_of(halves, CONFIG, ids, 2), expected, atol=2e-5)


def test_scale_and_bias_of_logits() -> None:
    """Of a vocabulary that the devices do not divide, as its bias."""
    plain = CONFIG.replace(vocab_size=31, tie_word_embeddings=False, logit_soft_cap=None)
    biased, ids = plain.replace(logit_scale=0.25, lm_head_bias=True), prompt(6, 31)

    def answer(config: ModelConfig, tp_size: int) -> tuple[Any, np.ndarray]:
        params = load_params(Path("nowhere"), config, mesh_of(tp_size), jnp.float32, "dummy", progress=False)
        return params, logits_of(params, config, ids, tp_size)

    for tp_size in (1, 2):
        params, logits = answer(biased, tp_size)
        bias = np.asarray(params["lm_head_bias"])
        assert len(bias) == (31 if tp_size == 1 else 32) and np.ptp(bias[:31]) > 0
        np.testing.assert_allclose(logits, (answer(plain, tp_size)[1] + bias[:31]) * 0.25, atol=1e-6)
