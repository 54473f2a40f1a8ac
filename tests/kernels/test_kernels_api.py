"""How an attention backend is chosen."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from jaxserve.kernels.api import BACKENDS, AttentionBackend, AttentionSpec, choose_backend
from jaxserve.kernels.reference import ReferenceAttention

SPEC = AttentionSpec(platform="cpu", num_heads=8, num_kv_heads=2, head_dim=64)


@dataclasses.dataclass(frozen=True)
class OneHeadDim(ReferenceAttention):
    """A backend that is fast and picky."""

    name: str = "picky"

    def supports(self, spec: AttentionSpec) -> str | None:
        return None if spec.head_dim == 128 else f"head_dim must be 128, got {spec.head_dim}."


CHOICE: tuple[AttentionBackend, ...] = (OneHeadDim(), ReferenceAttention())


def test_auto_takes_the_first_that_can() -> None:
    assert choose_backend("auto", SPEC, CHOICE).name == "reference"
    assert choose_backend("auto", dataclasses.replace(SPEC, head_dim=128), CHOICE).name == "picky"


def test_a_name_insists() -> None:
    assert choose_backend("reference", dataclasses.replace(SPEC, head_dim=128), CHOICE).name == "reference"
    with pytest.raises(NotImplementedError, match="attention backend 'picky': head_dim must be 128, got 64"):
        choose_backend("picky", SPEC, CHOICE)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="attention_backend must be one of auto, picky, reference; got 'flash'"):
        choose_backend("flash", SPEC, CHOICE)


def test_auto_gives_every_reason() -> None:
    with pytest.raises(NotImplementedError, match=r"head_dim must be 128.*9 query heads are not a multiple of 2"):
        choose_backend("auto", dataclasses.replace(SPEC, num_heads=9), CHOICE)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_reference_runs_everywhere(platform: str) -> None:
    spec = AttentionSpec(platform, 6, 2, 80, uses_soft_cap=True, uses_sinks=True)
    assert choose_backend("reference", spec).name == "reference"


def test_spec_of_a_config() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        num_heads: int = 8
        num_kv_heads: int = 2
        head_dim: int = 64

    assert AttentionSpec.of(Config(), platform="cpu") == SPEC


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_what_every_backend_promises(backend: AttentionBackend) -> None:
    hash(backend)  # jitted functions are cached by it
    one, four = (backend.kv_page_shape(heads, 64, backend.default_page_size) for heads in (1, 4))
    assert four[backend.kv_head_axis] == 4 * one[backend.kv_head_axis]
    assert [a == b for a, b in zip(one, four, strict=True)].count(False) == 1
    for dtype in (jnp.float32, jnp.bfloat16):
        assert jnp.dtype(backend.kv_storage_dtype(dtype, "cpu")).itemsize == jnp.dtype(dtype).itemsize
