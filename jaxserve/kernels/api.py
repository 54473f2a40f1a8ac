"""Paged attention: what a backend offers, and how one is chosen.

Models and the executor see this module only. A backend owns the layout of a KV page, the writing of new keys and values and
the attention over them. The rest of the runtime may assume that dimension 0 of the pool counts pages, and nothing else.

To add a backend: write a class with AttentionBackend's members and put an instance into BACKENDS before the ones it beats.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.typing

from jaxserve.kernels.metadata import AttentionMetadata
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.spec import AttentionSpec

__all__ = ["BACKENDS", "AttentionBackend", "AttentionMetadata", "AttentionSpec", "choose_backend"]


class AttentionBackend(Protocol):
    """One implementation of paged attention. Frozen and hashable: jitted functions close over it.

    All array methods are called inside jit and shard_map, with the heads of one shard.
    """

    @property
    def name(self) -> str: ...
    @property
    def default_page_size(self) -> int: ...
    @property
    def kv_head_axis(self) -> int:
        """Axis of a page (not of the pool) that tensor parallelism splits; its size is a multiple of num_kv_heads."""
        ...

    def supports(self, spec: AttentionSpec) -> str | None:
        """None, or the reason why not, as a sentence."""
        ...

    def kv_page_shape(self, num_kv_heads: int, head_dim: int, page_size: int) -> tuple[int, ...]:
        """Of one page of one layer. The pool is [num_layers * num_pages, *page_shape]."""
        ...

    def kv_storage_dtype(self, dtype: jax.typing.DTypeLike, platform: str) -> jax.typing.DTypeLike:
        """The dtype to allocate the pool in, so that it holds keys and values of `dtype` with the same number of bytes."""
        ...

    def plan(
        self,
        *,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
        page_table: jax.Array,
        slot_pages: jax.Array,
        slot_offsets: jax.Array,
        decode_only: bool,
    ) -> AttentionMetadata:
        """Once per step. The arguments are AttentionMetadata's fields."""
        ...

    def write_kv(
        self, kv_cache: jax.Array, k: jax.Array, v: jax.Array, metadata: AttentionMetadata, page_offset: jax.typing.ArrayLike
    ) -> jax.Array:
        """Writes k, v [T, Hkv, D] into the pages page_offset + slot_pages; in place if the pool is donated or carried."""
        ...

    def ragged_paged_attention(
        self,
        q: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
        sliding_window: Any = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of q [T, Hq, D] over each row's pages, this step's keys and values included: they are written first.

        Query i of a row stands at position kv_len - q_len + i and sees the positions in (position - sliding_window, position];
        sliding_window is an int or int32 scalar, None for no limit. `soft_cap` c turns a score s into c * tanh(s / c).
        `sinks` [Hq] are scores of a key per head that has no value. Softmax and sums are float32; the result [T, Hq, D] has q's
        dtype, and zeros for padding tokens.
        """
        ...


# In the order of preference of "auto".
BACKENDS: tuple[AttentionBackend, ...] = (ReferenceAttention(),)


def choose_backend(name: str, spec: AttentionSpec, backends: tuple[AttentionBackend, ...] = BACKENDS) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first that supports `spec`.

    Raises ValueError for an unknown name, NotImplementedError with the reason if a named backend (or, for "auto", every
    backend) does not support `spec`.
    """
    candidates = backends if name == "auto" else tuple(backend for backend in backends if backend.name == name)
    if not candidates:
        known = ", ".join(["auto", *(backend.name for backend in backends)])
        raise ValueError(f"attention_backend must be one of {known}; got {name!r}.")
    reasons = []
    for backend in candidates:
        reason = backend.supports(spec)
        if reason is None:
            return backend
        reasons.append(f"attention backend {backend.name!r}: {reason}")
    raise NotImplementedError(" ".join(reasons))
