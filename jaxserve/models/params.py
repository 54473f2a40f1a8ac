"""The weights of a model, described: every array's shape, type, logical axes, and where its rows stand in the checkpoint.

This is the only place that knows both our layout and Hugging Face's names. The loader, the dummy weights, the Orbax reader and
the shardings all walk the same tree of ArrayInfo. Our layout:

* Matrices are [in, out]: x @ W. (XLA's CPU matmul reads that order 1.3 to 2 times as fast as [out, in].)
* q, k and v are one matrix; its columns go key/value head by key/value head: the group's query heads, then k, then v. So a
  shard of the columns is a set of whole groups, and one matmul feeds the attention.
* gate and up are one matrix too, in the order of the shards: a shard's columns of gate, then the same columns of up. One matmul
  reads x once for both, and a shard finds them in its two halves.
* Layers are separate arrays by default. XLA on CPU copies a layer's weights out of a stacked array in every step, which makes
  a step of a larger model 2.5 times as slow; stacked layers (for `lax.scan`) trade that for a compile time that does not grow
  with the depth.
* With more devices than key/value heads each head is repeated; the vocabulary is padded with zero rows to a multiple of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.config import ModelConfig

TENSOR_AXIS = "tensor"

# The one table from logical axes to mesh axes; None: not sharded. kv_groups: columns of the fused q, k, v matrix; gate_up: of
# the fused gate and up matrix.
LOGICAL_TO_MESH: dict[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "kv_groups": TENSOR_AXIS,
    "gate_up": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "hidden": None,
    "head_dim": None,
    "layers": None,
}

ParamTree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rows:
    """`count` consecutive rows of tensor number `tensor` of a Source; None: rows of zeros."""

    tensor: int | None
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class Source:
    """How an array comes out of a Hugging Face checkpoint: rows of tensors one below the other, transposed if it is a matrix.

    `names[i]` has the shape `shapes[i]`, [out] or [out, in].
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rows: tuple[Rows, ...]
    transposed: bool


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One array of the tree. `mean` and `std` are what dummy weights are drawn with."""

    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[str, ...]
    source: Source | None  # None: stacked layers, made from the single ones
    mean: float = 0.0
    std: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.logical_axes), (self.shape, self.logical_axes)

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(LOGICAL_TO_MESH[axis] for axis in self.logical_axes))

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def check_tp(config: ModelConfig, tp_size: int) -> None:
    """ValueError with both numbers if the model cannot be split over `tp_size` devices."""
    for name in ("num_heads", "intermediate_size"):
        value = getattr(config, name)
        if value % tp_size:
            raise ValueError(f"--tp-size must divide the model's {name}={value}; got {tp_size}.")
    if config.num_kv_heads % tp_size and tp_size % config.num_kv_heads:
        raise ValueError(
            f"--tp-size must divide the model's num_kv_heads={config.num_kv_heads} or be a multiple of it; got {tp_size}."
        )


def abstract_params(config: ModelConfig, dtype: Any, tp_size: int, *, stacked: bool = False) -> ParamTree:
    """The tree of ArrayInfo (global shapes): {embed, layers: [{attn_norm, attn, mlp_norm, mlp}], final_norm, lm_head?}.

    With `stacked`, `layers` is one such dict whose arrays have a leading layer axis.
    """
    check_tp(config, tp_size)
    describe = _Describer(config, np.dtype(dtype), tp_size)
    layers: Any = [describe.layer(index) for index in range(config.num_layers)]
    if stacked:
        layers = jax.tree.map(lambda info: _stacked(info, config.num_layers), layers[0])
    return describe.outer(layers)


def param_specs(config: ModelConfig, dtype: Any, tp_size: int, *, stacked: bool = False) -> ParamTree:
    """The same tree with the PartitionSpec of every array."""
    return jax.tree.map(lambda info: info.spec, abstract_params(config, dtype, tp_size, stacked=stacked))


def param_shardings(config: ModelConfig, dtype: Any, mesh: Mesh, *, stacked: bool = False) -> ParamTree:
    """The same tree with the NamedSharding of every array on `mesh`."""
    arrays = abstract_params(config, dtype, mesh.shape[TENSOR_AXIS], stacked=stacked)
    return jax.tree.map(lambda info: NamedSharding(mesh, info.spec), arrays)


def kv_copies(config: ModelConfig, tp_size: int) -> int:
    """How often each key/value head is repeated so that every device has one."""
    return max(1, tp_size // config.num_kv_heads)


def map_named(visit: Callable[..., Any], tree: ParamTree, *others: ParamTree) -> ParamTree:
    """Maps `visit(dotted name, leaf, ...)` over trees of one structure."""

    def named(path: tuple[Any, ...], *leaves: Any) -> Any:
        return visit(".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), *leaves)

    return jax.tree_util.tree_map_with_path(named, tree, *others)


def _stacked(info: ArrayInfo, num_layers: int) -> ArrayInfo:
    axes = ("layers", *info.logical_axes)
    return dataclasses.replace(info, shape=(num_layers, *info.shape), logical_axes=axes, source=None)


@dataclasses.dataclass(frozen=True)
class _Describer:
    """Builds the ArrayInfo of one model, type and device count."""

    config: ModelConfig
    dtype: np.dtype
    tp_size: int

    def outer(self, layers: Any) -> ParamTree:
        cfg = self.config
        tree = {
            "embed": self._vocab_rows("model.embed_tokens.weight", transposed=False),
            "layers": layers,
            "final_norm": self._norm("model.norm.weight", cfg.hidden_size, "hidden"),
        }
        if not cfg.tie_word_embeddings:
            tree["lm_head"] = self._vocab_rows("lm_head.weight", transposed=True)
        return tree

    def layer(self, index: int) -> ParamTree:
        cfg, prefix = self.config, f"model.layers.{index}"
        return {
            "attn_norm": self._norm(f"{prefix}.input_layernorm.weight", cfg.hidden_size, "hidden"),
            "attn": self._attention(f"{prefix}.self_attn"),
            "mlp_norm": self._norm(f"{prefix}.post_attention_layernorm.weight", cfg.hidden_size, "hidden"),
            "mlp": self._mlp(f"{prefix}.mlp"),
        }

    def _attention(self, prefix: str) -> ParamTree:
        cfg = self.config
        q_size = cfg.num_heads * cfg.head_dim
        tree = {
            "qkv": self._qkv(prefix, "weight"),
            "o": self._matrix(f"{prefix}.o_proj.weight", (q_size, cfg.hidden_size), ("heads", "hidden")),
        }
        if cfg.qkv_bias:
            tree["qkv_bias"] = self._qkv(prefix, "bias")
        if cfg.o_bias:
            tree["o_bias"] = self._vector(f"{prefix}.o_proj.bias", cfg.hidden_size, "hidden")
        if cfg.qk_norm:
            tree["q_norm"] = self._norm(f"{prefix}.q_norm.weight", cfg.head_dim, "head_dim")
            tree["k_norm"] = self._norm(f"{prefix}.k_norm.weight", cfg.head_dim, "head_dim")
        return tree

    def _mlp(self, prefix: str) -> ParamTree:
        cfg = self.config
        hidden, inner = cfg.hidden_size, cfg.intermediate_size
        tree = {
            "gate_up": self._gate_up(prefix, "weight"),
            "down": self._matrix(f"{prefix}.down_proj.weight", (inner, hidden), ("mlp", "hidden")),
        }
        if cfg.mlp_bias:
            tree["gate_up_bias"] = self._gate_up(prefix, "bias")
            tree["down_bias"] = self._vector(f"{prefix}.down_proj.bias", hidden, "hidden")
        return tree

    def _norm(self, name: str, size: int, axis: str) -> ArrayInfo:
        return dataclasses.replace(self._vector(name, size, axis), mean=1.0)

    def _vector(self, name: str, size: int, axis: str) -> ArrayInfo:
        source = Source((name,), ((size,),), (Rows(0, 0, size),), transposed=False)
        return ArrayInfo((size,), self.dtype, (axis,), source, std=0.02)

    def _matrix(self, name: str, shape: tuple[int, int], axes: tuple[str, str]) -> ArrayInfo:
        size_in, size_out = shape
        source = Source((name,), ((size_out, size_in),), (Rows(0, 0, size_out),), transposed=True)
        return ArrayInfo(shape, self.dtype, axes, source, std=size_in**-0.5)

    def _vocab_rows(self, name: str, *, transposed: bool) -> ArrayInfo:
        """Embedding [vocab, hidden] or, transposed, output head [hidden, vocab], padded to a multiple of the devices."""
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        padding = -vocab % self.tp_size
        rows = (Rows(0, 0, vocab), *([Rows(None, 0, padding)] if padding else []))
        source = Source((name,), ((vocab, hidden),), rows, transposed)
        shape, axes = (vocab + padding, hidden), ("vocab", "hidden")
        if transposed:
            shape, axes = (shape[1], shape[0]), (axes[1], axes[0])
        return ArrayInfo(shape, self.dtype, axes, source, std=hidden**-0.5)

    def _qkv(self, prefix: str, kind: str) -> ArrayInfo:
        """Fused q, k, v matrix or bias; the order of its columns is in the module's docstring."""
        cfg, dim = self.config, self.config.head_dim
        copies = kv_copies(cfg, self.tp_size)
        q_count = cfg.group_size // copies * dim
        rows: list[Rows] = []
        for group in range(cfg.num_kv_heads * copies):
            kv_start = group // copies * dim
            rows += [Rows(0, group * q_count, q_count), Rows(1, kv_start, dim), Rows(2, kv_start, dim)]
        heads = {"q": cfg.num_heads, "k": cfg.num_kv_heads, "v": cfg.num_kv_heads}
        return self._fused(prefix, kind, {part: count * dim for part, count in heads.items()}, rows, "kv_groups")

    def _gate_up(self, prefix: str, kind: str) -> ArrayInfo:
        """Fused gate and up matrix or bias; the order of its columns is in the module's docstring."""
        inner = self.config.intermediate_size
        part = inner // self.tp_size
        rows = [Rows(which, shard * part, part) for shard in range(self.tp_size) for which in (0, 1)]
        return self._fused(prefix, kind, {"gate": inner, "up": inner}, rows, "gate_up")

    def _fused(self, prefix: str, kind: str, sizes: dict[str, int], rows: list[Rows], axis: str) -> ArrayInfo:
        """Several projections of the hidden state as one, or their biases. `sizes`: of a name's part in the checkpoint."""
        names = tuple(f"{prefix}.{part}_proj.{kind}" for part in sizes)
        size_out, hidden = sum(row.count for row in rows), self.config.hidden_size
        if kind == "bias":
            source = Source(names, tuple((size,) for size in sizes.values()), tuple(rows), transposed=False)
            return ArrayInfo((size_out,), self.dtype, (axis,), source, std=0.02)
        source = Source(names, tuple((size, hidden) for size in sizes.values()), tuple(rows), transposed=True)
        return ArrayInfo((hidden, size_out), self.dtype, ("hidden", axis), source, std=hidden**-0.5)
