"""How a TPU pool lays out a token's key and value: lanes, pages, and the packing of queries that goes with them.

A page is [Hkv, page_size, width]: heads first, so that a head's keys are whole (sublane, lane) tiles in VMEM and go to the
matrix unit as they lie there. With tokens first (as RPA v3 has it) a token is written by one exact copy, but every head has to
be picked out of packed sublanes before each product. Here it is the write that pays: it reads and rewrites the aligned group
of 8..32 tokens around a new one (write), once per token and not once per token read.

A row is a key followed by its value. Each starts at a multiple of 128 lanes unless leaving no gap saves lanes: then the value
follows the key at once (head_dim 64: 128 lanes instead of 256; 192: 384 instead of 512). The products run over whole groups
of 128 lanes; q is zero where the row is not key, and the result's lanes that are not value are dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8


def align(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Lanes of one token's row of one KV head."""

    key_dim: int  # the key is lanes 0:key_dim
    value_dim: int  # the value is lanes value_start:value_start + value_dim
    value_start: int
    width: int  # a multiple of 128

    @staticmethod
    def of(head_dim: int, value_dim: int | None = None) -> RowLayout:
        """Key and value, of the same size if there is no `value_dim`."""
        value_dim = head_dim if value_dim is None else value_dim
        dense = align(head_dim + value_dim, LANES) < align(head_dim, LANES) + align(value_dim, LANES)
        value_start = head_dim if dense else align(head_dim, LANES)
        return RowLayout(head_dim, value_dim, value_start, align(value_start + value_dim, LANES))

    @staticmethod
    def latent(latent_dim: int, rope_dim: int) -> RowLayout:
        """MLA: the row is the key, and its first latent_dim lanes are the value too."""
        key_dim = latent_dim + rope_dim
        return RowLayout(key_dim, latent_dim, 0, align(key_dim, LANES))

    @property
    def key_lanes(self) -> int:
        """Lanes 0:key_lanes are multiplied with q."""
        return align(self.key_dim, LANES)

    @property
    def first_value_lane(self) -> int:
        return self.value_start // LANES * LANES

    @property
    def value_lanes(self) -> int:
        """Lanes first_value_lane:first_value_lane + value_lanes are multiplied with the weights."""
        return align(self.value_start + self.value_dim, LANES) - self.first_value_lane

    def page_shape(self, num_kv_heads: int, page_size: int) -> tuple[int, int, int]:
        return (num_kv_heads, page_size, self.width)

    def rows(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """k, v [.., their dim] -> [.., width]; lanes that are neither are zero, for products run over them."""
        gap, rest = self.value_start - self.key_dim, self.width - self.value_start - self.value_dim
        zeros = [jnp.zeros((*k.shape[:-1], n), k.dtype) for n in (gap, rest)]
        return jnp.concatenate([k, zeros[0], v, zeros[1]], axis=-1)

    def value_of(self, out: jax.Array) -> jax.Array:
        """[..., value_lanes] -> [..., value_dim]."""
        start = self.value_start - self.first_value_lane
        return out[..., start : start + self.value_dim]


def pack_queries(q: jax.Array, num_kv_heads: int, tile_tokens: int, num_tiles: int, key_lanes: int) -> jax.Array:
    """q [T, Hq, D] -> [Hkv, num_tiles, tile_rows, key_lanes]: the G queries of tile_tokens tokens are a product's rows."""
    T, Hq, D = q.shape
    G = Hq // num_kv_heads
    q = jnp.pad(q, ((0, num_tiles * tile_tokens - T), (0, 0), (0, key_lanes - D)))
    q = q.reshape(num_tiles, tile_tokens, num_kv_heads, G, key_lanes).transpose(2, 0, 1, 3, 4)
    q = q.reshape(num_kv_heads, num_tiles, tile_tokens * G, key_lanes)
    return jnp.pad(q, ((0, 0), (0, 0), (0, align(tile_tokens * G, SUBLANES) - tile_tokens * G), (0, 0)))


def tokens_of_tiles(out: jax.Array, tile_tokens: int, group: int) -> jax.Array:
    """Results [Hkv, num_tiles, tile_rows, lanes] -> [Hkv, num_tiles * tile_tokens, G, lanes]."""
    Hkv, num_tiles, _, lanes = out.shape
    return out[:, :, : tile_tokens * group].reshape(Hkv, num_tiles * tile_tokens, group, lanes)


def unpack_tokens(out: jax.Array, num_tokens: int) -> jax.Array:
    """[Hkv, num_tokens or more, G, Dv] -> [num_tokens, Hq, Dv]."""
    Hkv, _, G, Dv = out.shape
    return out[:, :num_tokens].transpose(1, 0, 2, 3).reshape(num_tokens, Hkv * G, Dv)


def token_of_row(tile_tokens: int, group: int) -> np.ndarray:
    """int32 [tile_rows, 128]: which token of its tile a row belongs to, the same in all lanes. Padding rows say token 0."""
    rows = np.arange(align(tile_tokens * group, SUBLANES))
    token = np.where(rows < tile_tokens * group, rows // group, 0)
    return np.broadcast_to(token.astype(np.int32)[:, None], (len(rows), LANES))


@overload
def kept_in_hbm(x: jax.Array, interpret: Any) -> jax.Array: ...
@overload
def kept_in_hbm(x: None, interpret: Any) -> None: ...
def kept_in_hbm(x: jax.Array | None, interpret: Any) -> jax.Array | None:
    """`x` as a kernel's operand that XLA must not move to VMEM first; it likes to do that with a pool that is small."""
    if x is None or interpret:
        return x
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


def compiler_params(checked: bool, vmem_limit_bytes: int | None = None) -> pltpu.CompilerParams:
    """Of a kernel whose steps depend on each other. The chip's own checks, of the bounds of every copy and of semaphores at the
    end, cost scalar instructions beside each copy; `checked` keeps them, to find a fault. The interpreter checks always."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",),
        vmem_limit_bytes=vmem_limit_bytes,
        disable_bounds_checks=not checked,
        disable_semaphore_checks=not checked,
    )
