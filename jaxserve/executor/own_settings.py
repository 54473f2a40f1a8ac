"""JAX's checks, of which a program may have switched on some for its own code: not for ours, which runs beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """In this thread JAX does what it does in a process of ours. What shapes programs stays as the program has it."""
    with (
        jax.transfer_guard("allow"),  # a step's input and output go from and to the host
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.debug_nans(False),  # a row's broken logits are an answer
        jax.debug_infs(False),
        jax.disable_jit(False),
    ):
        yield
