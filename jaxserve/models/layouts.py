"""From the layout of one device (as checkpoints of ours store it and dummy weights are drawn) to that of several.

Four things differ: the vocabulary is padded with zeros, key/value heads are repeated when there are more devices than heads,
the columns of gate and up are dealt out to the shards, and experts or slices of them stand where options put them. All of it
happens on the devices, inside jit, so that XLA moves only what a shard needs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.arrays import ArrayInfo, KVGroups
from jaxserve.models.expert_placement import ExpertSlots


def is_rearranged(single: ArrayInfo, info: ArrayInfo, tp_size: int) -> bool:
    """Whether columns stand elsewhere than in the layout for one device; zeros behind them do not count."""
    if info.logical_axes[-1] == "gate_up":
        return tp_size > 1
    if info.slots is not None:
        return True
    return info.groups is not None and single.shape != info.shape


def spread(array: jax.Array, info: ArrayInfo, tp_size: int) -> jax.Array:
    """An array of the layout for one device in the layout `info` describes. The same array if nothing differs."""
    if info.logical_axes[-1] == "gate_up":
        array = _deal_gate_up(array, tp_size)
    elif info.slots is not None:
        array = _place_experts(array, info.slots, info.logical_axes)
    elif array.shape == info.shape:
        return array
    elif info.groups is not None:
        array = _repeat_kv(array, info.groups, info.shape[-1])
    elif "vocab" in info.logical_axes:
        array = jnp.pad(array, [(0, wanted - size) for size, wanted in zip(array.shape, info.shape, strict=True)])
    assert array.shape == info.shape, (array.shape, info.shape)
    return array


def _deal_gate_up(array: jax.Array, tp_size: int) -> jax.Array:
    """All of gate, then all of up, becomes each shard's part of gate, then of up."""
    if tp_size == 1:
        return array
    *outer, columns = array.shape
    parts = array.reshape(*outer, 2, tp_size, columns // (2 * tp_size))
    return jnp.swapaxes(parts, -3, -2).reshape(array.shape)


def _place_experts(array: jax.Array, slots: ExpertSlots, axes: tuple[str, ...]) -> jax.Array:
    """[experts, ...] -> [slots of all devices, ...] of a slice each."""
    num_experts, slices = len(array), slots.slices
    if axes[-1] == "expert_gate_up":
        *outer, columns = array.shape
        parts = jnp.moveaxis(array.reshape(*outer, 2, slices, columns // (2 * slices)), -2, 1)
        parts = parts.reshape(num_experts * slices, *outer[1:], columns // slices)
    elif axes[1] == "expert_mlp":
        parts = array.reshape(num_experts * slices, array.shape[1] // slices, *array.shape[2:])
    else:  # what is added to an expert's answer once
        parts = jnp.pad(array[:, None], ((0, 0), (0, slices - 1), *[(0, 0)] * (array.ndim - 1)))
        parts = parts.reshape(num_experts * slices, *array.shape[1:])
    return parts[np.array([expert * slices + part for expert, part in slots.by_device])]


def _repeat_kv(array: jax.Array, layout: KVGroups, columns: int) -> jax.Array:
    """Splits each group of query heads into equal parts and gives every part a copy of the group's k and v."""
    dim, groups, size = layout.head_dim, layout.num_kv_heads, layout.group_size
    copies = (columns // dim - groups * size) // (2 * groups)
    outer = array.shape[:-1]
    grouped = array.reshape(*outer, groups, size + 2, dim)
    q = grouped[..., :size, :].reshape(*outer, groups * copies, size // copies, dim)
    kv = jnp.repeat(grouped[..., size:, :], copies, axis=-3)
    return jnp.concatenate([q, kv], axis=-2).reshape(*outer, columns)
