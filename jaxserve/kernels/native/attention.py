"""NativeAttention: the reference's pages, and attention over them by a C++ custom call, for float32 on CPUs.

XLA on CPU gathers keys and values float by float, at 3 to 4 GB/s on two cores, and writes them out before it multiplies: half
of a decode step of many rows. It compiles the loops around that for each layer anew. The custom call (paged_attention.cc) reads
pages where they are. Where there is no C++ compiler, the reference serves. Numbers: benchmarks/results/cpu_step.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np

from jaxserve.kernels.metadata import AttentionMetadata
from jaxserve.kernels.native.library import PAGED_ATTENTION, NoLibraryError, target_name
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.reference_pages import ReferenceKV
from jaxserve.kernels.spec import AttentionSpec

_LARGEST_WINDOW = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class NativeAttention(ReferenceAttention):
    """AttentionBackend in C++, for CPUs."""

    name: ClassVar[str] = "native"
    platforms: ClassVar[tuple[str, ...]] = ("cpu",)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        for kind, dtype in (("queries", spec.dtype), ("keys and values", spec.kv_dtype)):
            if dtype != "float32":
                return f"{kind} must be float32, not {dtype}."
        try:
            target_name(PAGED_ATTENTION)
        except NoLibraryError as error:
            return str(error)
        return super().supports(spec)

    def plan(self, step: AttentionMetadata) -> AttentionMetadata:
        """The custom call cuts the step itself, so nothing is divided here."""
        return step.without_padding()

    def ragged_paged_attention(
        self,
        q: jax.Array,
        kv_cache: ReferenceKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
        sliding_window: Any = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        T, Hq, D = q.shape
        Hkv = kv_cache.num_kv_heads
        grouped = q.reshape(T, Hkv, Hq // Hkv, D)
        call = jax.ffi.ffi_call(target_name(PAGED_ATTENTION), jax.ShapeDtypeStruct(grouped.shape, jnp.float32))
        with jax.named_scope("attention"):
            out = call(
                grouped,
                kv_cache.values,
                metadata.kv_lens,
                metadata.cu_q_lens,
                metadata.page_table,
                jnp.asarray(page_offset, jnp.int32),
                jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
                scale=np.float32(scale),
                soft_cap=np.float32(soft_cap or 0),
                window=np.int64(min(sliding_window or 0, _LARGEST_WINDOW)),
                decode_q_len=np.int64(metadata.decode_q_len or 0),
                causal=np.bool_(self.spec.is_causal),
            )
        return out.reshape(T, Hq, D)
