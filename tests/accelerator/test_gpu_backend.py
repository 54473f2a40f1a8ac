"""The GPU backend as the executor drives it, interpreted: write, then attend, decode and mixed steps, against the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Heads, assert_same_bits, expected, make_step, not_causal, rounded, run, spec_of

from jaxserve.kernels.api import BACKENDS, AttentionSpec, Chip, choose_backend
from jaxserve.kernels.pallas.gpu.attention import PallasGpuAttention
from tests.accelerator.conftest import relative_error

H200 = Chip("gpu", "NVIDIA H200", (9, 0), 132)
TINY = Chip("gpu", "NVIDIA H200", (9, 0), 2)  # the interpreter runs every multiprocessor in turn
HEADS = Heads(4, 2, 64)
# NaN is what the interpreter's uninitialised memory holds; rows of a tile that belong to no query may be multiplied with it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")

BF16_ERROR = 1e-2

DECODE = [(1, 70), (0, 0), (1, 1), (1, 16), (1, 130)]
VERIFY = [(8, 70), (0, 0), (1, 1), (5, 16), (3, 130)]
MANY = [(11, 70), (5, 5), (2, 130), (10, 40)]
SIXTEEN = Heads(16, 1, 64)  # of which a product has room for four queries
MIXED = [(1, 70), (20, 60), (0, 0), (1, 1), (33, 33), (2, 17)]


@pytest.mark.parametrize(
    ("rows", "heads", "decode_q_len", "window"),
    [
        (DECODE, HEADS, 1, None),
        (VERIFY, HEADS, 8, None),
        (VERIFY, HEADS, 8, 20),
        (MANY, SIXTEEN, 11, None),
        (MANY, SIXTEEN, 11, 40),
        (MIXED, HEADS, None, None),
        (VERIFY, Heads(4, 2, 32), 8, 20),
        (MIXED, Heads(4, 2, 72), None, None),
    ],
    ids=["decode", "verify", "verify in a window", "many queries", "many queries in a window", "mixed", "heads of 32", "of 72"],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_steps(
    rows: list[tuple[int, int]], heads: Heads, decode_q_len: int | None, window: int | None, page_size: int, interpret: Any
) -> None:
    step = make_step(rows, heads, page_size=page_size, decode_q_len=decode_q_len, num_tokens=None if decode_q_len else 64)
    step = rounded(step, jnp.bfloat16)

    def bind(spec: AttentionSpec) -> PallasGpuAttention:
        return PallasGpuAttention(dataclasses.replace(spec, chip=TINY, windows=(window,)), interpret)

    out = run(bind, step, jnp.bfloat16, num_layers=2, layer=1, static_window=window)
    assert relative_error(out, expected(step, sliding_window=window)) < BF16_ERROR
    assert not np.any(out[~step.is_live])


def test_the_same_bits_in_any_step(interpret: Any) -> None:
    def bind(spec: AttentionSpec) -> PallasGpuAttention:
        return PallasGpuAttention(dataclasses.replace(spec, chip=TINY, windows=(20,)), interpret)

    assert_same_bits(bind, HEADS, (16, 64), jnp.bfloat16, static_window=20)


TEXTS = [(n, n) for n in (70, 1, 16, 0, 2, 131)]


@pytest.mark.parametrize(
    ("heads", "windows", "page_size"),
    [
        (Heads(2, 2, 64), (None,), 64),
        (HEADS, (None, 20), 16),
        (SIXTEEN, (1, 60), 16),
        (Heads(2, 2, 32), (None,), 64),
    ],
    ids=["all", "all and a window", "windows", "heads of 32"],
)
def test_texts_of_an_encoder(heads: Heads, windows: tuple[int | None, ...], page_size: int, interpret: Any) -> None:
    step = rounded(make_step(TEXTS, heads, page_size=page_size, num_tokens=232), jnp.bfloat16)

    def bind(spec: AttentionSpec) -> PallasGpuAttention:
        return PallasGpuAttention(dataclasses.replace(spec, chip=TINY, windows=windows), interpret)

    for window in windows:
        out = run(not_causal(bind), step, jnp.bfloat16, static_window=window)
        assert relative_error(out, expected(step, is_causal=False, sliding_window=window)) < BF16_ERROR
        assert not np.any(out[~step.is_live])


def supported(**changes: Any) -> AttentionSpec:
    step = make_step([(1, 1)], Heads(32, 8, 128))
    return spec_of(step, jnp.bfloat16, H200, **{"page_size": 64, **changes})


def test_auto_takes_it_on_hopper() -> None:
    assert choose_backend("auto", supported()).name == "pallas"
    assert choose_backend("auto", supported(is_causal=False, windows=(None, 65))).name == "pallas"
    assert choose_backend("auto", dataclasses.replace(supported(), head_dim=32)).name == "pallas"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chip": Chip("gpu", "NVIDIA A100", (8, 0), 108)}, "A100 has compute capability 8.0.*wgmma"),
        ({"chip": Chip("gpu", "NVIDIA B200", (10, 0), 148)}, "B200 has compute capability 10.0.*tcgen05"),
        ({"page_size": 4}, "page"),
        ({"head_dim": 264}, "head_dim"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "float32"),
        ({"num_heads": 9}, "not a multiple"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_said_by_name(changes: dict[str, Any], reason: str) -> None:
    spec = dataclasses.replace(supported(), **changes)
    with pytest.raises(NotImplementedError, match=reason):
        choose_backend("pallas", spec)
    if spec.num_heads % spec.num_kv_heads == 0:
        assert choose_backend("auto", spec, BACKENDS).name == "reference"
