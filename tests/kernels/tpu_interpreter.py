"""What tests of TPU kernels share: the interpreter's parameters, a check for races, and block sizes for a few dozen tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.pallas.tpu.tuning import PassConfig, TpuConfig

INTERPRET = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")

# A few dozen tokens fill several blocks, tiles, KV blocks and chunks.
SMALL = TpuConfig(
    decode=PassConfig(2, 1, kv_block_tokens=16, kv_chunk_tokens=8, head_unroll=2, split_masked=False, num_buffers=3),
    extend=PassConfig(16, 8, kv_block_tokens=16, kv_chunk_tokens=8, head_unroll=1, split_masked=True),
    decode_queries=3,
    min_write_group=4,
    max_write_group=64,
    vmem_limit_bytes=None,
)
# Chunks of whole 128 lanes, as hardware has them.
WIDE = TpuConfig(
    decode=PassConfig(4, 1, kv_block_tokens=128, kv_chunk_tokens=128, head_unroll=1, split_masked=False),
    extend=PassConfig(16, 16, kv_block_tokens=256, kv_chunk_tokens=256, head_unroll=1, split_masked=True),
    decode_queries=1,
    min_write_group=32,
    max_write_group=64,
    vmem_limit_bytes=None,
)


def fail_on_races(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fixture's body: the test fails if any kernel that it interprets has a data race."""
    states: list[Any] = []

    class Kept(interpret_pallas_call.RaceDetectionState):  # one per kernel; the interpreter itself keeps only the last
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            states.append(self)

    monkeypatch.setattr(interpret_pallas_call, "RaceDetectionState", Kept)
    # Most of a test's time is XLA compiling the interpreter's program, which then runs once.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    interpret_pallas_call.reset_tpu_interpret_mode_state()
    assert not any(state.races_found for state in states), "a kernel has a data race"
