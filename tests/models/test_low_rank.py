"""A weight with adapters in a narrow type: what GPUs compute, interpreted, and what other platforms do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from low_rank_cases import SHAPES, draw, expected

from jaxserve.kernels.pallas.gpu.low_rank import add_low_rank
from jaxserve.models.adapters.low_rank import AdaptedWeight, LowRank, TokenSlots
from jaxserve.models.weight import PlainWeight

SHAPE = SHAPES[2]


def test_both_ways_are_the_sum() -> None:
    drawn = draw(SHAPE)
    narrow = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), drawn.adapters)
    adapters = LowRank(narrow.a * SHAPE.size_in**-0.5, narrow.b, narrow.widths)
    x, slots = jnp.asarray(drawn.x, jnp.bfloat16), jnp.asarray(drawn.slots)
    matrix = jax.random.normal(jax.random.key(0), (SHAPE.size_in, drawn.base.shape[1]), jnp.bfloat16)
    base = PlainWeight(matrix).project(x)
    exact = jax.tree.map(lambda array: np.asarray(array, np.float32), (adapters, base, x))
    wanted = expected(drawn._replace(adapters=exact[0], base=exact[1], x=exact[2]))

    of_tokens = TokenSlots.of(slots, adapters)
    assert of_tokens.tiles is not None
    elsewhere = jax.jit(lambda x: AdaptedWeight(PlainWeight(matrix), adapters, of_tokens).project(x))(x)
    on_gpus = add_low_rank(base, x, of_tokens.tiles, adapters.a, adapters.b, adapters.widths, interpret=True)
    assert elsewhere.dtype == on_gpus.dtype == jnp.bfloat16
    for found in (elsewhere, on_gpus):
        error = np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)
        assert error < 1e-2
        np.testing.assert_array_equal(np.asarray(found)[drawn.slots < 0], np.asarray(base)[drawn.slots < 0])


def test_float32_is_left_to_exact_products() -> None:
    drawn = draw(SHAPE)
    assert TokenSlots.of(jnp.asarray(drawn.slots), jax.tree.map(jnp.asarray, drawn.adapters)).tiles is None
