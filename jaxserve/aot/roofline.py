"""The least time a step can take on a chip: bytes, operations and messages, from the model's shapes, over the chip's peaks.

Of a pipeline each stage has a time of its own (`pipeline_roofline` puts them together); a model that is not divided is one.

Counted by us, since XLA's own numbers leave out what kernels do: weights read once; keys, values and states read and written;
logits; products with weights and of attention; what all-reduces and the logits' all-gather send (with attention by data
parallelism an all-gather and a reduce-scatter count as an all-reduce of all devices). Not counted: activations,
norms, recurrences, sampling, the latency of a collective or a launch. Of experts, those that the tokens choose are read and
multiplied; supposed is that tokens choose independently and all experts alike. So a step takes longer than said here; how much,
only the chip can tell.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.aot.chips import GPUS_PER_HOST, ChipSpec
from jaxserve.models import ALL_AXES, TENSOR_AXIS, ArrayInfo, LayerSpec, ModelConfig, MoESpec, abstract_params
from jaxserve.models.blocks.state_inputs import state_bytes

LOGITS_BYTES = 4  # float32


@dataclasses.dataclass(frozen=True)
class ModelShard:
    """What one of `tp_size` devices holds of a model, or of a pipeline's stage."""

    config: ModelConfig
    dtype: str
    tp_size: int
    kv_token_bytes: float  # of one token in one layer that attends, scales included
    dcp_size: int = 1  # devices that share latents by tokens

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.config, self.dtype, self.tp_size)

    @property
    def attn_tp_size(self) -> int:
        return self.tp_size // self.config.attn_dp_size

    @property
    def num_heads(self) -> int:
        return self.config.num_heads // self.attn_tp_size

    @property
    def state_bytes(self) -> int:
        """Of one sequence, in all layers that keep states."""
        mixers, count = self.config.state_layers, self.config.own_cache_groups.count("states")
        return count * state_bytes(mixers[0], self.dtype, self.attn_tp_size) if count else 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer here that attends."""
        return tuple(group for group in self.config.own_cache_groups if group != "states")

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.dtype).itemsize)

    def arrays(self) -> Any:
        return _arrays(self.config, self.dtype, self.tp_size)


@functools.cache
def _arrays(config: ModelConfig, dtype: str, tp_size: int) -> Any:
    return abstract_params(config, jnp.dtype(dtype), tp_size)


def weight_bytes(config: ModelConfig, dtype: str, tp_size: int) -> int:
    """On each device."""
    leaves: list[ArrayInfo] = jax.tree.leaves(_arrays(config, dtype, tp_size))
    return sum(_shard(info, info.num_bytes, tp_size, config.attn_dp_size) for info in leaves)


def _shard(info: ArrayInfo, amount: int, tp_size: int, attn_dp_size: int) -> int:
    if _is_of_all(info):
        return amount // tp_size
    return amount // (tp_size // attn_dp_size) if TENSOR_AXIS in info.spec else amount


def _is_of_all(info: ArrayInfo) -> bool:
    """Sharded over all devices, also with attention by data parallelism."""
    return any(axis == ALL_AXES for axis in info.spec)


@dataclasses.dataclass(frozen=True)
class StepShape:
    """A step: `num_rows` sequences that bring `new_tokens` each, after which each is `context_len` tokens long; as many in each
    shard, with attention by data parallelism, or in one alone (`is_packed`)."""

    num_rows: int
    new_tokens: int
    context_len: int
    sampled_tokens: int = 1  # of each sequence: the tokens whose logits are wanted
    num_shards: int = 1
    is_packed: bool = False

    @property
    def tokens(self) -> int:
        """Of one shard."""
        return self.num_rows * self.new_tokens

    @property
    def all_tokens(self) -> int:
        return self.tokens * (1 if self.is_packed else self.num_shards)


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Of one device in one step."""

    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    logits_bytes: int
    matmul_flops: int
    attention_flops: int
    all_reduce_bytes: int  # the messages' sizes
    all_gather_bytes: int  # of the whole result
    handed_on_bytes: int = 0  # hidden states that the next stage of a pipeline gets from this device

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.logits_bytes

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops


def step_work(shard: ModelShard, step: StepShape) -> StepWork:
    cfg, tp_size, arrays = shard.config, shard.tp_size, shard.arrays()
    tokens, lines = step.tokens, step.num_rows * step.sampled_tokens * step.num_shards * cfg.makes_logits
    layers = [(cfg.layers[index], arrays["layers"][index]) for index in cfg.own_layers]
    own_params = sum(_matrix_params(tree, shard, of_all=False) for _, tree in layers)
    all_params = sum(_matrix_params(tree, shard) + _chosen_params(layer, tree, tp_size) for layer, tree in layers)
    idle_bytes = sum(_idle_expert_bytes(layer, tree, step.all_tokens, shard) for layer, tree in layers)
    pairs, keys = (_attended if cfg.is_causal else _attended_both_ways)(shard.windows, step)
    head_params = _matrix_params(arrays.get("lm_head", arrays.get("embed")), shard) if cfg.makes_logits else 0
    width = cfg.hidden_size * shard.itemsize
    return StepWork(
        weight_bytes=shard.weight_bytes - _unread_table_bytes(shard, step) - idle_bytes,
        kv_read_bytes=round(step.num_rows * (keys * shard.kv_token_bytes + shard.state_bytes)),
        kv_write_bytes=round(tokens * len(shard.windows) * shard.kv_token_bytes + step.num_rows * shard.state_bytes),
        logits_bytes=lines * cfg.vocab_size * LOGITS_BYTES,
        matmul_flops=2 * (tokens * own_params + step.all_tokens * all_params + lines * head_params),
        attention_flops=2 * step.num_rows * shard.num_heads * _attention_products(shard, step, pairs),
        all_reduce_bytes=_summed_tokens(shard, step) * width,
        all_gather_bytes=(tp_size > 1) * lines * cfg.vocab_size * LOGITS_BYTES + _brought_together(shard, step),
        handed_on_bytes=(not cfg.has_head) * tokens * width,
    )


def _unread_table_bytes(shard: ModelShard, step: StepShape) -> int:
    """Of the embedding, of which rows are looked up; as the output head, too, it is read whole."""
    cfg, table = shard.config, shard.arrays().get("embed")
    if table is None or (cfg.makes_logits and "lm_head" not in shard.arrays()):
        return 0
    looked_up = step.all_tokens * cfg.hidden_size * shard.itemsize
    return _shard(table, table.num_bytes, shard.tp_size, cfg.attn_dp_size) - looked_up


def _summed_tokens(shard: ModelShard, step: StepShape) -> int:
    """Of all sums: behind each mixer, each MLP and the embedding."""
    mixers = len(shard.config.own_layers)
    mlps = mixers + shard.config.embeds
    if step.num_shards == 1:
        return (shard.tp_size > 1) * (mixers + mlps) * step.tokens
    within = (shard.attn_tp_size > 1) * (mixers + (0 if step.is_packed else mlps)) * step.tokens
    return within + (2 if step.is_packed else 1) * mlps * step.all_tokens


def _brought_together(shard: ModelShard, step: StepShape) -> int:
    """Bytes by which queries and latents that devices share come together, in all layers."""
    cfg = shard.config
    if shard.dcp_size == 1 or cfg.latent_dim is None:
        return 0
    if _expands(cfg, step):
        latents = step.num_rows * step.context_len * cfg.head_dim * shard.itemsize
        return len(shard.windows) * latents
    per_head = (cfg.head_dim + cfg.latent_dim) * shard.itemsize + 4  # a query, what it found, and a log sum
    return len(shard.windows) * step.tokens * shard.num_heads * shard.dcp_size * per_head


def _attention_products(shard: ModelShard, step: StepShape, pairs: int) -> int:
    """Of one sequence and one head, in all layers. Latents are absorbed or projected, as the backends have it."""
    cfg = shard.config
    head, latent_dim = cfg.projected, cfg.latent_dim
    if head is None or latent_dim is None:
        return pairs * 2 * cfg.head_dim
    if not _expands(cfg, step):
        return pairs * (cfg.head_dim + latent_dim)
    cached = step.context_len - step.new_tokens  # what the new tokens are projected with counts as weights
    return pairs * (head.key_dim + head.value_dim) + len(shard.windows) * cached * head.products_per_token(latent_dim)


def _expands(cfg: ModelConfig, step: StepShape) -> bool:
    """Latents are projected to keys and values."""
    fewest = None if cfg.projected is None or cfg.latent_dim is None else cfg.projected.pays_from(cfg.latent_dim)
    return fewest is not None and step.new_tokens >= fewest


def _matrix_params(tree: Any, shard: ModelShard, *, of_all: bool = True) -> int:
    """Of one device, without experts: of what multiplies the tokens of all shards, or what its own shard's."""
    matrices: list[ArrayInfo] = [info for info in jax.tree.leaves(tree) if len(info.shape) == 2 and not _is_of_experts(info)]
    sizes = shard.tp_size, shard.config.attn_dp_size
    return sum(_shard(info, math.prod(info.shape), *sizes) for info in matrices if _multiplies_all(info) == of_all)


def _multiplies_all(info: ArrayInfo) -> bool:
    return _is_of_all(info) or "routes" in info.logical_axes


def _chosen_params(layer: LayerSpec, tree: Any, tp_size: int) -> int:
    """Of the experts of one token, a device's share."""
    if not isinstance(layer.mlp, MoESpec):
        return 0
    matrices: list[ArrayInfo] = [info for info in jax.tree.leaves(tree) if len(info.shape) == 3]
    return sum(math.prod(info.shape[1:]) for info in matrices) * layer.mlp.experts_per_token // tp_size


def _idle_expert_bytes(layer: LayerSpec, tree: Any, tokens: int, shard: ModelShard) -> int:
    """Of the experts that none of so many tokens chooses, on average."""
    if not isinstance(layer.mlp, MoESpec):
        return 0
    held = sum(info.num_bytes // shard.tp_size for info in jax.tree.leaves(tree) if _is_of_experts(info))
    return round(held * (1 - layer.mlp.experts_per_token / layer.mlp.num_experts) ** tokens)


def _is_of_experts(info: ArrayInfo) -> bool:
    return info.logical_axes[0] == "experts"


def _attended(windows: Iterable[int | None], step: StepShape) -> tuple[int, int]:
    """Of one sequence, summed over the layers: (pairs of a query and a key it sees, keys that some query sees)."""
    pairs = keys = 0
    first = step.context_len - step.new_tokens + 1  # positions that the first new token sees, and
    last = step.context_len  # the last one
    for window in windows:
        limit = min(window or last, last)
        growing = max(limit - first + 1, 0)  # tokens whose view still grows
        pairs += growing * (first + limit) // 2 + (step.new_tokens - growing) * limit
        keys += min(last, limit + step.new_tokens - 1)
    return pairs, keys


def _attended_both_ways(windows: Iterable[int | None], step: StepShape) -> tuple[int, int]:
    """The same of an encoder, whose steps bring whole texts."""
    length = step.context_len
    seen = [length if window is None else min(2 * window - 1, length) for window in windows]
    return sum(seen) * step.new_tokens, len(seen) * length


@dataclasses.dataclass(frozen=True)
class Interconnect:
    """How the devices of a mesh reach each other. Of GPUs on several hosts each host is a chip."""

    num_chips: int
    devices_per_chip: int  # that take part
    bytes_per_s: float  # one direction, over all the links of the chip that has the fewest
    in_chip_bytes_per_s: float | None

    @staticmethod
    def of(chip: ChipSpec, num_devices: int, links: int) -> Interconnect:
        if chip.network_bytes_per_s is not None and num_devices > GPUS_PER_HOST:
            hosts, out = -(-num_devices // GPUS_PER_HOST), GPUS_PER_HOST * chip.network_bytes_per_s
            return Interconnect(hosts, GPUS_PER_HOST, out, chip.link_bytes_per_s)
        per_chip = min(chip.devices_per_chip, num_devices)
        return Interconnect(-(-num_devices // per_chip), per_chip, links * chip.link_bytes_per_s, chip.in_chip_bytes_per_s)

    def all_reduce_s(self, num_bytes: int) -> float:
        """Bandwidth-optimal: every chip sends and receives 2 (n - 1) / n of the message; a chip's devices add up first."""
        seconds = 0.0
        if self.num_chips > 1:
            seconds += 2 * (self.num_chips - 1) / self.num_chips * num_bytes / self.bytes_per_s
        if self.devices_per_chip > 1:
            assert self.in_chip_bytes_per_s is not None
            seconds += 2 * (self.devices_per_chip - 1) / self.devices_per_chip * num_bytes / self.in_chip_bytes_per_s
        return seconds

    def all_gather_s(self, num_bytes: int) -> float:
        """`num_bytes` is the size of the result."""
        seconds = 0.0
        if self.num_chips > 1:
            seconds += (self.num_chips - 1) / self.num_chips * num_bytes / self.bytes_per_s
        if self.devices_per_chip > 1:
            assert self.in_chip_bytes_per_s is not None
            seconds += (self.devices_per_chip - 1) / self.devices_per_chip * num_bytes / self.in_chip_bytes_per_s
        return seconds


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds at the chip's peaks. Memory and compute overlap; a collective's result is what the next product waits for."""

    memory_s: float
    compute_s: float
    interconnect_s: float

    @property
    def step_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.interconnect_s

    @property
    def bound(self) -> str:
        parts = {"memory": self.memory_s, "compute": self.compute_s, "interconnect": self.interconnect_s}
        return max(parts, key=lambda name: parts[name])


def predict(work: StepWork, chip: ChipSpec, dtype: str, interconnect: Interconnect) -> Prediction:
    return Prediction(
        memory_s=work.memory_bytes / chip.hbm_bytes_per_s,
        compute_s=work.flops / chip.flops_per_s(dtype),
        interconnect_s=interconnect.all_reduce_s(work.all_reduce_bytes) + interconnect.all_gather_s(work.all_gather_bytes),
    )
