"""Paged attention: what a backend offers, and how one is chosen.

Of attention, models and the executor see this module and `rotary` only. A backend is bound to one AttentionSpec; it owns the
layout of a KV page, the writing of new keys and values and the attention over them. The rest of the runtime may assume that the
KV cache is a pytree of arrays whose dimension 0 counts pages, and nothing else.

To add a backend: write a class with AttentionBackend's members and put it into BACKENDS before the ones it beats.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import jax
import jax.typing

from jaxserve.kernels.latent import LatentBackend
from jaxserve.kernels.metadata import AttentionMetadata
from jaxserve.kernels.native.attention import NativeAttention
from jaxserve.kernels.pages import PageArray
from jaxserve.kernels.pallas.gpu.attention import PallasGpuAttention
from jaxserve.kernels.pallas.gpu.latent_attention import PallasGpuLatentAttention
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention, PallasTpuLatentAttention
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.reference_latent import ReferenceLatentAttention
from jaxserve.kernels.rotary import Rotary
from jaxserve.kernels.spec import AttentionSpec, Chip

__all__ = [
    "BACKENDS",
    "LATENT_BACKENDS",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "Chip",
    "LatentBackend",
    "PageArray",
    "PagedBackend",
    "choose_backend",
    "choose_latent_backend",
]

logger = logging.getLogger(__name__)

B = TypeVar("B", bound="PagedBackend")


class PagedBackend(Protocol):
    """What backends of every kind have. Frozen and hashable: jitted functions close over it.

    All array methods are called inside jit and shard_map, with the heads of one shard.
    """

    name: ClassVar[str]
    platforms: ClassVar[tuple[str, ...]]  # of devices it runs on; several backends of one name share the work by platform
    default_page_size: ClassVar[int]

    @property
    def spec(self) -> AttentionSpec:
        """What it was bound to; the page size is known by now."""
        ...

    def __init__(self, spec: AttentionSpec) -> None: ...

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None, or the reason why not, as a sentence."""
        ...

    def kv_pages(self) -> Any:
        """The KV cache as a pytree of PageArray: each is an array [num_layers * num_pages, *page shape]."""
        ...

    def plan(self, step: AttentionMetadata) -> AttentionMetadata:
        """`step` with the backend's work. Once per step, for all its layers."""
        ...


class AttentionBackend(PagedBackend, Protocol):
    """One implementation of paged attention with keys and values per head, for one spec."""

    def rope_and_write(
        self,
        qkv: jax.Array,
        rotary: Rotary | None,
        kv_cache: Any,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
    ) -> tuple[jax.Array, Any]:
        """Norms and rotates queries and keys, and writes keys and values into the pages page_offset + slot_pages.

        qkv [T, Hkv, G + 2, D] holds each KV head's G queries, its key and its value. Returns the queries [T, Hq, D] and the
        cache, which is updated in place if it is donated or carried.
        """
        ...

    def ragged_paged_attention(
        self,
        q: jax.Array,
        kv_cache: Any,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
        sliding_window: Any = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of q [T, Hq, D] over each row's pages, this step's keys and values included: they are written first.

        Query i of a row stands at position kv_len - q_len + i and sees the positions in (position - sliding_window, position].
        If the spec is not causal it sees those in (position - sliding_window, position + sliding_window), as far as kv_len, and
        q_len == kv_len for all rows, in a step of any row lengths (decode_q_len None). Without a window that is all of the row,
        or all up to the position. sliding_window is one of the spec's windows (reference: also an int32 scalar). `soft_cap` c
        turns a score s into c * tanh(s / c). `sinks` [Hq] are scores of a key per head that has no value. Softmax and sums are
        float32; the result [T, Hq, D] has q's dtype, and zeros for padding tokens.
        """
        ...


# In the order of preference of "auto".
BACKENDS: tuple[type[AttentionBackend], ...] = (PallasGpuAttention, PallasTpuAttention, NativeAttention, ReferenceAttention)
LATENT_BACKENDS: tuple[type[LatentBackend], ...] = (
    PallasGpuLatentAttention,
    PallasTpuLatentAttention,
    ReferenceLatentAttention,
)


def choose_latent_backend(name: str, spec: AttentionSpec) -> LatentBackend:
    """As `choose_backend`, for a spec with a latent_dim."""
    return _choose(name, spec, LATENT_BACKENDS)


def choose_backend(name: str, spec: AttentionSpec, backends: Sequence[type[AttentionBackend]] = BACKENDS) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first that supports `spec`, bound to `spec`.

    Raises ValueError for an unknown name, NotImplementedError with the reason if a named backend (or, for "auto", every
    backend) does not support `spec`. What "auto" passes over is logged with its reason.
    """
    return _choose(name, spec, backends)


def _choose(name: str, spec: AttentionSpec, backends: Sequence[type[B]]) -> B:
    known = tuple(dict.fromkeys(["auto", *(backend.name for backend in backends)]))
    if name not in known:
        raise ValueError(f"attention_backend must be one of {', '.join(known)}; got {name!r}.")
    named = [backend for backend in backends if name in ("auto", backend.name)]
    candidates = [backend for backend in named if spec.chip.platform in backend.platforms]
    if not candidates:
        platforms = " or ".join(dict.fromkeys(platform for backend in named for platform in backend.platforms))
        raise NotImplementedError(f"attention backend {name!r} runs on {platforms}, this device is a {spec.chip.platform}.")
    reasons: list[str] = []
    for backend in candidates:
        bound = spec if spec.page_size else dataclasses.replace(spec, page_size=backend.default_page_size)
        reason = backend.supports(bound)
        if reason is None:
            for passed_over in reasons:
                logger.info("Not used: %s", passed_over)
            return backend(bound)
        reasons.append(f"attention backend {backend.name!r}: {reason}")
    raise NotImplementedError(" ".join(reasons))
