"""A model whose products of few rows are the custom call's: what it computes, and who gets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpp_compiler import needs_compiler
from dense_model import logits_of, mesh_of, prompt

from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.kernels.native import library
from jaxserve.kernels.native.few_rows import MOST_ROWS
from jaxserve.models import ModelConfig, load_params
from jaxserve.models.blocks.embedding import tied_lm_head
from jaxserve.models.native_weight import NativeWeight
from jaxserve.models.weight import PlainWeight, Weight

pytestmark = needs_compiler

CheckpointOf = Callable[[str], Path]


@pytest.mark.parametrize(("name", "tp_size"), [("llama", 1), ("llama", 4), ("qwen3", 1)])
def test_logits_are_those_of_plain_weights(name: str, tp_size: int, checkpoint: CheckpointOf) -> None:
    plain = ModelConfig.from_pretrained(checkpoint(name))
    native, ids = plain.replace(native_products=True), prompt(MOST_ROWS, plain.vocab_size)
    logits = [
        logits_of(load_params(checkpoint(name), config, mesh_of(tp_size), jnp.float32, progress=False), config, ids, tp_size)
        for config in (plain, native)
    ]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


def custom_calls(weight: Weight, num_rows: int) -> int:
    lowered = jax.jit(weight.project).lower(jax.ShapeDtypeStruct((num_rows, 32), jnp.float32))
    return lowered.as_text().count(library.FEW_ROWS)


def test_only_few_rows_are_the_custom_calls() -> None:
    matrix, table = jnp.ones((32, 64)), jnp.ones((64, 32))

    class Held:
        def __getitem__(self, _: object) -> jax.Array:
            return table

    for weight in (NativeWeight(matrix), tied_lm_head(Held(), native=True)):
        assert custom_calls(weight, 1) == custom_calls(weight, MOST_ROWS) == 1
        assert custom_calls(weight, MOST_ROWS + 1) == 0
    for weight in (PlainWeight(matrix), tied_lm_head(Held(), native=False)):
        assert custom_calls(weight, 1) == 0


@pytest.mark.parametrize(("dtype", "expected"), [("float32", True), ("bfloat16", False)])
def test_a_float32_server_on_a_cpu_has_them(dtype: str, expected: bool, checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama")
    blueprint = Blueprint.draw(ServerArgs(model_path=str(folder), dtype=dtype), ModelConfig.from_pretrained(folder), mesh_of(1))
    assert blueprint.config.native_products == expected
    assert isinstance(blueprint.arrays["layers"][0]["attn"]["o"], NativeWeight) == expected
