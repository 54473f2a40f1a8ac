"""Low-rank adapters (LoRA) of matrices, many at a time: each token of a step has the adapter in its slot, or none.

A matrix W with an adapter is W + A B. Adapters are in slots of arrays that all tokens share, so shapes do not depend on who is
in the step. Whose A and B a token is multiplied with is the platform's choice, when a program is lowered:
* GPU: its own, by two kernels of ours (`kernels/pallas/gpu/low_rank.py`), for the shapes and types that they take.
* CPU: its own, by a custom call (`kernels/native/low_rank.cc`), for the weights that have custom calls of their own.
* TPU, and elsewhere: A of all slots, of which it keeps its own slot's product, and that with the B of all. Two products for
  XLA, in which a rank of 16 takes as long as one of 128: little more work than for one slot, as long as slots are few.

T tokens, S slots, P matrices that are fused into W, R largest rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.kernels.native.low_rank import add_low_rank
from jaxserve.models.grouped import Groups, matmul_precision
from jaxserve.models.native_weight import NativeWeight, TiedNativeWeight
from jaxserve.models.weight import Weight

if TYPE_CHECKING:
    from jaxserve.kernels.pallas.gpu.low_rank import SlotTiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """What the slots hold for one matrix of the model, which may be several of a checkpoint's. Ranks below R are filled with
    zeros, as is what an adapter does not change."""

    a: Any  # [S, in, P, R]
    b: tuple[Any, ...]  # per fused matrix [S, R, its columns]
    # Columns of W come in periods: of each fused matrix in turn so many.
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def product(self, x: jax.Array, slots: jax.Array) -> jax.Array:
        """x [T, in], slots int32 [T], -1 without an adapter -> float32 [T, out]: what is added to x W."""
        (num_slots, _, _, _), precision = self.a.shape, matmul_precision(x)
        with jax.named_scope("adapters"):
            shrunk = jnp.einsum("ti,sipr->tspr", x, self.a, precision=precision, preferred_element_type=jnp.float32)
            shrunk = jnp.where(_is_own(slots, num_slots)[:, :, None, None], shrunk, 0).astype(x.dtype)
            parts = [_expanded(shrunk[:, :, part], b) for part, b in enumerate(self.b)]
            if len(parts) == 1:
                return parts[0]
            periods = [part.reshape(len(x), -1, width) for part, width in zip(parts, self.widths, strict=True)]
            return jnp.concatenate(periods, axis=2).reshape(len(x), -1)

    def rows(self, indices: jax.Array, slots: jax.Array) -> jax.Array:
        """The same for one-hot x, [T, in] with a one at `indices` int32 [T]: what is added to rows of a table."""
        num_slots = self.a.shape[0]
        with jax.named_scope("adapters"):
            own = self.a.at[jnp.maximum(slots, 0), indices, 0].get(mode="clip")
            return _expanded(jnp.where(_is_own(slots, num_slots)[:, :, None], own[:, None], 0), self.b[0])


def _is_own(slots: jax.Array, num_slots: int) -> jax.Array:
    """bool [T, S]"""
    return slots[:, None] == jnp.arange(num_slots)


def _expanded(shrunk: jax.Array, b: jax.Array) -> jax.Array:
    """[T, S, R], of each token but one slot's, times b [S, R, columns] -> float32 [T, columns]."""
    precision = matmul_precision(shrunk)
    return jnp.einsum("tsr,sro->to", shrunk, b, precision=precision, preferred_element_type=jnp.float32)


class TokenSlots(NamedTuple):
    """Which slot each token of a step uses."""

    slots: jax.Array  # int32 [T], -1 without an adapter
    tiles: SlotTiles | None  # for the kernels on GPUs, the same

    @staticmethod
    def of(slots: jax.Array, held: LowRank | AdapterSlots) -> TokenSlots:
        """`held`: what the slots hold, or of one matrix."""
        a = next((leaf for leaf in jax.tree.leaves(held)), None)
        if a is None or a.dtype == jnp.float32:
            return TokenSlots(slots, None)
        from jaxserve.kernels.pallas.gpu.low_rank import SlotTiles  # a second of imports, for a server on a CPU

        return TokenSlots(slots, SlotTiles.of(slots, len(a)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A Weight that adds each token's adapter."""

    base: Any
    adapters: LowRank
    slots: TokenSlots

    def project(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        base: Weight = self.base
        out = base.project(x, out_dtype)
        (slots, tiles), a, b, widths = self.slots, self.adapters.a, self.adapters.b, self.adapters.widths
        if isinstance(base, NativeWeight | TiedNativeWeight):
            return add_low_rank(out, x, slots, a, b, widths)

        def with_all(out: jax.Array, x: jax.Array) -> jax.Array:
            return (out + self.adapters.product(x, slots)).astype(out.dtype)

        if tiles is None:
            return with_all(out, x)
        from jaxserve.kernels.pallas.gpu import low_rank as gpu

        if not gpu.takes_low_rank(x, a, b, widths):
            return with_all(out, x)

        def with_own(out: jax.Array, x: jax.Array) -> jax.Array:
            with jax.named_scope("adapters"):
                return gpu.add_low_rank(out, x, tiles, a, b, widths)

        result: jax.Array = jax.lax.platform_dependent(out, x, cuda=with_own, default=with_all)
        return result

    def project_groups(self, x: jax.Array, groups: Groups) -> jax.Array:
        raise AssertionError("experts have no adapters")


class AdapterSlots(NamedTuple):
    """What the slots hold, of a model or a stage of it."""

    layers: Any  # dict of layer -> dict of place in its tree of weights ("attn.qkv") -> LowRank
    embed: Any  # LowRank, or None
    lm_head: Any  # likewise


@dataclasses.dataclass(frozen=True)
class StepAdapters:
    """Of a step: what the slots hold, and which slot each token uses."""

    held: AdapterSlots
    own: TokenSlots  # of this shard's tokens
    of_all: TokenSlots  # of those of all shards, which MLPs and the vocabulary work on

    @staticmethod
    def of(held: AdapterSlots, own: jax.Array, of_all: jax.Array) -> StepAdapters:
        """Slots int32 [T] and [A]."""
        of_own = TokenSlots.of(own, held)
        return StepAdapters(held, of_own, of_own if of_all is own else TokenSlots.of(of_all, held))

    def adapt(self, layer: int, weights: Any) -> Any:
        """The layer's tree of weights with an AdaptedWeight where there are adapters."""
        return _adapted(weights, "", self.held.layers[layer], self)

    def rows(self, indices: jax.Array) -> jax.Array | float:
        """What is added to rows of the embedding that are taken for the tokens of all shards."""
        return 0.0 if self.held.embed is None else self.held.embed.rows(indices, self.of_all.slots)


def _adapted(tree: Any, name: str, adapters: dict[str, LowRank], step: StepAdapters) -> Any:
    if name in adapters:
        return AdaptedWeight(tree, adapters[name], step.of_all if name.startswith("mlp.") else step.own)
    if not isinstance(tree, dict):
        return tree
    return {key: _adapted(below, f"{name}.{key}" if name else str(key), adapters, step) for key, below in tree.items()}
