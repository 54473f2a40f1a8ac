"""Of backends that are bound to be batch-invariant: a query gets the same bits whatever step it comes in."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import pytest
from attention_cases import Heads, assert_same_bits
from tpu_interpreter import INTERPRET, SMALL

from jaxserve.kernels.native.attention import NativeAttention
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention
from jaxserve.kernels.reference import ReferenceAttention


@pytest.mark.parametrize("backend", [ReferenceAttention, NativeAttention])
@pytest.mark.parametrize("options", [{}, {"static_window": 21, "soft_cap": 3.0}], ids=str)
def test_on_cpus(backend: Any, options: dict[str, Any]) -> None:
    assert_same_bits(backend, Heads(6, 2, 40), (1, 32), **options)


def test_reference_in_bfloat16() -> None:
    assert_same_bits(ReferenceAttention, Heads(4, 2, 64), (16,), jnp.bfloat16)


@pytest.mark.matrix  # of `make aot`
def test_on_tpus() -> None:
    bind = functools.partial(PallasTpuAttention, interpret=INTERPRET, override=SMALL)
    assert_same_bits(bind, Heads(4, 2, 16), (8,), static_window=21)
