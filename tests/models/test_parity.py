"""Logits against Transformers, for every family and option, on one device and sharded over several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import load_model
from dense_model import folder_logits, oracle_logits, prompt
from model_families import CASES

from jaxserve.models import ModelConfig

PROMPT_LEN = 48  # longer than every case's window, shorter than every case's context
ATOL = 1e-4

CheckpointOf = Callable[[str], Path]


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.matrix), 4])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tp_size: int, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    config = ModelConfig.from_pretrained(folder)
    ids = prompt(PROMPT_LEN, config.vocab_size)
    expected = oracle_logits(folder, ids)
    assert expected.std() > 0.3, "the checkpoint's logits are too flat to compare"
    logits = folder_logits(folder, ids, tp_size)
    assert logits.shape == (PROMPT_LEN, config.vocab_size)
    np.testing.assert_allclose(logits, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn", "llama-linear", "qwen2-yarn", "gemma3"])
def test_long_positions(name: str, checkpoint: CheckpointOf) -> None:
    """Beyond the context length before the extension, which is 64 tokens in these cases (or what is stretched: Gemma)."""
    folder = checkpoint(name)
    ids = prompt(300, 300)
    np.testing.assert_allclose(folder_logits(folder, ids), oracle_logits(folder, ids), atol=3e-4, rtol=0)


def test_dynamic_rope_equals_generation_step_by_step(checkpoint: CheckpointOf) -> None:
    """A token beyond max_position_embeddings=64 rotates as in Transformers when it is generated, one token at a time."""
    import torch
    from transformers import DynamicCache

    folder = checkpoint("llama-dynamic")
    ids = prompt(80, 300)
    expected = []
    with torch.no_grad():
        model = load_model(folder)
        cache = DynamicCache(config=model.config)
        model(torch.tensor([ids[:60]]), None, None, cache)  # by position: the name is another one since Transformers 5.24
        for token in ids[60:]:
            expected.append(model(torch.tensor([[token]]), None, None, cache).logits[0, -1].numpy())
    np.testing.assert_allclose(folder_logits(folder, ids)[60:], np.stack(expected), atol=ATOL, rtol=0)


@pytest.mark.parametrize(("name", "tp_size"), [("qwen3", 1), ("qwen3", 4), ("gemma2", 1), ("gemma3", 2)])
def test_bfloat16_is_near_float32(name: str, tp_size: int, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    ids = prompt(PROMPT_LEN, 300)
    expected = oracle_logits(folder, ids)
    logits = folder_logits(folder, ids, tp_size, dtype=jnp.bfloat16)
    assert np.abs(logits - expected).mean() < 0.05 * expected.std()
