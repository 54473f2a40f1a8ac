"""How an attention backend is chosen."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from jaxserve.kernels.api import BACKENDS, AttentionBackend, AttentionSpec, Chip, choose_backend, choose_latent_backend
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.spec import ProjectedHead

SPEC = AttentionSpec(Chip("cpu"), num_heads=8, num_kv_heads=2, head_dim=64, dtype="float32", kv_dtype="float32")


@dataclasses.dataclass(frozen=True)
class OneHeadDim(ReferenceAttention):
    """A backend that is fast and picky."""

    name: ClassVar[str] = "picky"
    platforms: ClassVar[tuple[str, ...]] = ("cpu", "gpu")
    default_page_size: ClassVar[int] = 64

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return None if spec.head_dim == 128 else f"head_dim must be 128, got {spec.head_dim}."


CHOICE: tuple[type[AttentionBackend], ...] = (OneHeadDim, ReferenceAttention)


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


def test_the_page_size_is_the_backends_unless_it_is_asked_for() -> None:
    wide = dataclasses.replace(SPEC, head_dim=128)
    assert choose_backend("auto", wide, CHOICE).spec.page_size == 64
    assert choose_backend("auto", SPEC, CHOICE).spec.page_size == 16
    assert choose_backend("auto", dataclasses.replace(wide, page_size=4), CHOICE).spec.page_size == 4


def test_what_auto_passes_over_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        choose_backend("auto", SPEC, CHOICE)
    assert [record.getMessage() for record in caplog.records] == [
        "Not used: attention backend 'picky': head_dim must be 128, got 64."
    ]


def test_a_backend_of_another_platform_is_no_candidate(caplog: pytest.LogCaptureFixture) -> None:
    on_tpu = dataclasses.replace(SPEC, chip=Chip("tpu"), head_dim=128)
    with caplog.at_level("INFO"):
        assert choose_backend("auto", on_tpu, CHOICE).name == "reference"
    assert not caplog.records
    with pytest.raises(NotImplementedError, match="attention backend 'picky' runs on cpu or gpu, this device is a tpu"):
        choose_backend("picky", on_tpu, CHOICE)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_reference_runs_everywhere(platform: str) -> None:
    spec = AttentionSpec(Chip(platform), 6, 2, 80, "bfloat16", "bfloat16", uses_soft_cap=True, uses_sinks=True)
    assert choose_backend("reference", spec).name == "reference"


@dataclasses.dataclass(frozen=True)
class Config:
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    windows: tuple[int | None, ...] = (None, 16, None)
    is_causal: bool = True
    latent_dim: int | None = None
    projected: ProjectedHead | None = None
    uses_soft_cap: bool = True
    uses_sinks: bool = False


def test_spec_of_a_config() -> None:
    whole = AttentionSpec.of(Config(), chip=Chip("cpu"), tp_size=1, dtype="float32")
    assert whole == dataclasses.replace(SPEC, windows=(None, 16), uses_soft_cap=True)
    shard = AttentionSpec.of(Config(), chip=Chip("cpu"), tp_size=4, dtype="bfloat16", kv_dtype="int8", page_size=8)
    assert (shard.num_heads, shard.num_kv_heads, shard.group, shard.kv_dtype, shard.page_size) == (2, 1, 2, "int8", 8)


def test_spec_of_an_encoder() -> None:
    spec = AttentionSpec.of(Config(is_causal=False), chip=Chip("cpu"), tp_size=1, dtype="float32")
    assert spec == dataclasses.replace(SPEC, windows=(None, 16), uses_soft_cap=True, is_causal=False)


def test_latents_are_of_causal_attention() -> None:
    chip = Chip("tpu", "TPU v6 lite")
    spec = AttentionSpec(chip, 16, 1, 576, "bfloat16", "bfloat16", latent_dim=512, is_causal=False)
    reason = "attention over latents is causal."
    with pytest.raises(NotImplementedError, match=f"'pallas': {reason} attention backend 'reference': {reason}"):
        choose_latent_backend("auto", spec)


def test_chip_of_a_device() -> None:
    @dataclasses.dataclass(frozen=True)
    class Device:
        platform: str = "gpu"
        device_kind: str = "NVIDIA H200"
        compute_capability: str = "9.0"
        core_count: int = 132

    assert Chip.of(Device()) == Chip("gpu", "NVIDIA H200", (9, 0), 132)
    assert Chip.of(jax.devices("cpu")[0]) == Chip("cpu", "cpu")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_what_every_backend_promises(backend: type[AttentionBackend]) -> None:
    for dtype in ("float32", "bfloat16"):
        spec = dataclasses.replace(SPEC, dtype=dtype, kv_dtype=dtype, page_size=backend.default_page_size)
        hash(backend(spec))  # jitted functions are cached by it
        one, four = (jax.tree.leaves(backend(dataclasses.replace(spec, num_kv_heads=heads)).kv_pages()) for heads in (1, 4))
        for a, b in zip(one, four, strict=True):
            assert a.head_axis is not None and b.shape[b.head_axis] == 4 * a.shape[a.head_axis]
            assert b.nbytes == 4 * a.nbytes
        assert one[0].nbytes == backend.default_page_size * 2 * 64 * jnp.dtype(dtype).itemsize
