"""ContextGroup: devices that share the cache of each row by tokens (context parallelism).

Of every page each device has a part, as many tokens as all others, in the order of their places: with C devices and parts of
n tokens a page is C * n tokens, of which device c has those from c * n on. Page tables and pages' numbers are the same
everywhere, so nobody who deals with pages has to know. A device writes what is its own. To attend, either queries come to the
keys: those of all devices' heads attend to the own tokens, and what comes of it goes back to the heads' device, where it is
merged by the logarithms of the sums. Or keys come to the queries, some pages at a time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels.metadata import NO_PAGE, AttentionMetadata, decode_q_lens


@dataclasses.dataclass(frozen=True)
class ContextGroup:
    """`size` neighbours along a mesh axis of `axis_size` devices."""

    axis: str
    axis_size: int
    size: int

    def own_slots(self, step: AttentionMetadata, part_tokens: int) -> AttentionMetadata:
        """`step` with the slots of its new tokens in this device's parts; none for tokens that are others'."""
        owner, offset = jnp.divmod(step.slot_offsets, part_tokens)
        pages = jnp.where(owner == self._place, step.slot_pages, NO_PAGE)
        return dataclasses.replace(step, slot_pages=pages, slot_offsets=offset)

    def by_token(self, step: AttentionMetadata, part_tokens: int) -> AttentionMetadata:
        """`step` as a step of T rows with a query each, which see all of this device's keys that they are given. Its slots are
        nowhere."""
        T = step.num_tokens
        row, seen = _rows_of(step), self._seen(step)
        return AttentionMetadata(
            kv_lens=self._num_own(seen, part_tokens),
            cu_q_lens=jnp.arange(T + 1, dtype=jnp.int32),
            page_table=step.page_table[row],
            slot_pages=jnp.full(T, NO_PAGE, jnp.int32),
            slot_offsets=jnp.zeros(T, jnp.int32),
            decode_q_len=1,
        )

    def all_heads(self, q: jax.Array) -> jax.Array:
        """Queries [T, H, D] of this device's heads -> [T, size * H, D], of all devices'."""
        return jax.lax.all_gather(q, self.axis, axis=1, tiled=True, axis_index_groups=self._groups)

    def merged(self, out: jax.Array, log_sums: jax.Array) -> jax.Array:
        """Attention to this device's keys, out [T, size * H, D] with log_sums float32 [T, size * H] -> [T, H, D]: that of this
        device's heads, to all keys."""
        outs, logs = _unpacked(self._to_heads(_packed(out, log_sums)), out.dtype)
        weights = jax.nn.softmax(logs, axis=0)[..., None]
        return jnp.sum(outs.astype(jnp.float32) * weights, axis=0).astype(out.dtype)

    def whole_pages(self, parts: jax.Array) -> jax.Array:
        """This device's parts [n, part_tokens, D] of some pages -> [size * n, part_tokens, D]: all parts of each, in order."""
        pages = jax.lax.all_gather(parts, self.axis, axis=1, axis_index_groups=self._groups)
        return pages.reshape(-1, *parts.shape[1:])

    @property
    def _groups(self) -> list[list[int]] | None:
        if self.size == self.axis_size:
            return None
        return [list(range(first, first + self.size)) for first in range(0, self.axis_size, self.size)]

    @property
    def _place(self) -> jax.Array:
        return jax.lax.axis_index(self.axis) % self.size

    def _to_heads(self, x: jax.Array) -> jax.Array:
        """x [T, size * H, ..] of this device's keys -> [size, T, H, ..] of this device's heads, by whose keys they are."""
        by_device = x.reshape(x.shape[0], self.size, -1, *x.shape[2:])
        return jax.lax.all_to_all(by_device, self.axis, split_axis=1, concat_axis=0, axis_index_groups=self._groups)

    def _num_own(self, lengths: jax.Array, part_tokens: int) -> jax.Array:
        """Of so many first tokens of a row those that this device has."""
        pages, rest = jnp.divmod(lengths, part_tokens * self.size)
        return pages * part_tokens + jnp.clip(rest - self._place * part_tokens, 0, part_tokens)

    @staticmethod
    def _seen(step: AttentionMetadata) -> jax.Array:
        """int32 [T]: the keys that a token sees, its own included; 0 for padding."""
        token, K = jnp.arange(step.num_tokens, dtype=jnp.int32), step.decode_q_len
        if K is None:
            row = rows_of_tokens(step.cu_q_lens, step.num_tokens)
            behind = step.cu_q_lens[row + 1] - token - 1
            return jnp.where(behind >= 0, step.kv_lens[row] - behind, 0)
        behind = decode_q_lens(step.kv_lens, step.cu_q_lens, K)[:, None] - jnp.arange(1, K + 1, dtype=jnp.int32)
        return jnp.where(behind >= 0, step.kv_lens[:, None] - behind, 0).reshape(-1)


def _packed(out: jax.Array, log_sums: jax.Array) -> jax.Array:
    """Both as whole numbers of out's size, log sums behind: what is sent at once waits for the others once."""
    word = jnp.dtype(f"uint{8 * out.dtype.itemsize}")
    logs = jax.lax.bitcast_convert_type(log_sums, word).reshape(*log_sums.shape, -1)
    return jnp.concatenate([jax.lax.bitcast_convert_type(out, word), logs], axis=-1)


def _unpacked(packed: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    words_of_log = 4 // jnp.dtype(dtype).itemsize
    out, logs = jnp.split(packed, [packed.shape[-1] - words_of_log], axis=-1)
    if words_of_log == 1:
        logs = logs[..., 0]
    return jax.lax.bitcast_convert_type(out, dtype), jax.lax.bitcast_convert_type(logs, jnp.float32)


def _rows_of(step: AttentionMetadata) -> jax.Array:
    if step.decode_q_len is None:
        return rows_of_tokens(step.cu_q_lens, step.num_tokens)
    return jnp.arange(step.num_tokens, dtype=jnp.int32) // step.decode_q_len


def rows_of_tokens(cu_q_lens: jax.Array, num_tokens: int) -> jax.Array:
    """int32 [T] by their borders [R + 1]; any for padding."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    found = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(found, len(cu_q_lens) - 2)
