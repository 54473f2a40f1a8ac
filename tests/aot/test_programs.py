"""What is reported of a compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.aot.programs import Compilation, ProgramReport

POOL = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def report(*donated: int) -> ProgramReport:
    def write(pool: jax.Array, page: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(pool, jnp.ones(128), page, 0)

    lowered = jax.jit(write, donate_argnums=donated).lower(POOL, jax.ShapeDtypeStruct((), jnp.int32))
    return Compilation("write", lowered, "cpu", (POOL.shape,), None, None).compile()


@pytest.mark.parametrize("donated", [(0,), ()], ids=["in place", "into another"])
def test_writing_in_place_is_no_copy_of_the_pool(donated: tuple[int, ...]) -> None:
    found = report(*donated)
    pool_bytes = POOL.size * POOL.dtype.itemsize
    assert found.error is None
    assert (found.aliased_bytes, found.new_output_bytes) == ((pool_bytes, 0) if donated else (0, pool_bytes))
    assert (found.pool_copies == 0) == bool(donated)
