"""AttentionSpec: what a model asks of an attention backend, on which chip."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # who reads a model's config needs no JAX
    from jaxserve.kernels.context import ContextGroup

# Of keys and values that are stored with a scale per token and KV head.
QUANTIZED_DTYPES = ("float8_e4m3fn", "int8")


@dataclasses.dataclass(frozen=True)
class ProjectedHead:
    """A head's key and value as they are projected from a latent; the key's end is the rotated one of all heads."""

    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def products_per_token(self, latent_dim: int) -> int:
        """To project a latent, or to absorb a query and project what it has read."""
        return latent_dim * (self.nope_dim + self.value_dim)

    def pays_from(self, latent_dim: int) -> int | None:
        """The queries of a row from which on it takes fewer products to project its keys and values than to absorb the queries,
        which makes their scores and sums longer: latent_dim in place of nope_dim and of value_dim. None: it never does."""
        saved = 2 * latent_dim - self.nope_dim - self.value_dim
        return -(-self.products_per_token(latent_dim) // saved) if saved > 0 else None


class HeadConfig(Protocol):
    """What AttentionSpec.of reads of a model's config."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def is_causal(self) -> bool: ...
    @property
    def latent_dim(self) -> int | None: ...
    @property
    def projected(self) -> ProjectedHead | None: ...
    @property
    def uses_soft_cap(self) -> bool: ...
    @property
    def uses_sinks(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of the mesh; never of jax.devices(): we may compile for elsewhere."""

    platform: str  # cpu, gpu or tpu
    kind: str = ""  # "NVIDIA H200", "TPU v6 lite"
    compute_capability: tuple[int, int] | None = None  # of an NVIDIA GPU
    num_cores: int = 1  # streaming multiprocessors of a GPU

    @staticmethod
    def of(device: Any) -> Chip:
        """Of a jax.Device, a real one or one of a topology that is only compiled for."""
        capability = getattr(device, "compute_capability", None)
        return Chip(
            device.platform,
            device.device_kind,
            None if capability is None else _version(capability),
            getattr(device, "core_count", None) or 1,
        )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is asked of a backend. Heads are those of one shard, after tensor parallelism has split them."""

    chip: Chip
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of queries, and of keys and values before they are stored
    kv_dtype: str  # of the stored keys and values
    page_size: int | None = None  # None: what the backend likes best
    windows: tuple[int | None, ...] = (None,)  # sliding windows that layers use, each once; None: sees everything
    is_causal: bool = True  # False: a query sees those behind it, too; a step brings all tokens of each of its rows
    uses_soft_cap: bool = False
    uses_sinks: bool = False
    # What a query gets must not depend, to the last bit, on the rest of its step, nor on how its row came in steps: rows of one
    # query go the way of the others. Steps are then all of one size, never of decode rows only.
    batch_invariant: bool = False
    # All heads read one row of head_dim per token, whose first latent_dim are its value. None: a key and a value per head.
    latent_dim: int | None = None
    projected: ProjectedHead | None = None  # what latents are projected to; None: all attention is over the rows as they are
    context: ContextGroup | None = None  # what latents are dealt out to: page_size is that of a device's part

    @staticmethod
    def of(
        config: HeadConfig,
        *,
        chip: Chip,
        tp_size: int,
        dtype: str,
        kv_dtype: str = "auto",
        page_size: int | None = None,
        context: ContextGroup | None = None,
        batch_invariant: bool = False,
    ) -> AttentionSpec:
        """KV heads are repeated where there are fewer of them than shards. kv_dtype "auto" is `dtype`."""
        return AttentionSpec(
            chip,
            num_heads=config.num_heads // tp_size,
            num_kv_heads=max(config.num_kv_heads // tp_size, 1),
            head_dim=config.head_dim,
            dtype=dtype,
            kv_dtype=dtype if kv_dtype == "auto" else kv_dtype,
            page_size=page_size,
            windows=tuple(dict.fromkeys(config.windows)),
            is_causal=config.is_causal,
            uses_soft_cap=config.uses_soft_cap,
            uses_sinks=config.uses_sinks,
            latent_dim=config.latent_dim,
            projected=config.projected,
            context=context,
            batch_invariant=batch_invariant,
        )

    @property
    def expanding_pays_from(self) -> int | None:
        """`ProjectedHead.pays_from` of what latents are projected to."""
        return None if self.projected is None or self.latent_dim is None else self.projected.pays_from(self.latent_dim)

    @property
    def context_size(self) -> int:
        """Devices that have a part of each page."""
        return 1 if self.context is None else self.context.size

    @property
    def page_tokens(self) -> int:
        """Of a page with all of its parts."""
        assert self.page_size is not None, "known once a backend is bound"
        return self.page_size * self.context_size

    @property
    def absorbed_heads(self) -> int:
        """Query heads that attend to latents as they are: those of all devices that have a part of them."""
        return self.num_heads * self.context_size

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads
