"""Which collectives a forward program has with attention by data parallelism; without it, `hlo.expected_collectives`."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.models import ModelConfig


def expected_with_shards(config: ModelConfig, tp_size: int, *, packs_tokens: bool) -> Mapping[str, int]:
    """`packs_tokens` as in Bucket. Tokens come together before each MLP, and are taken apart behind, as behind the embedding;
    brought together are also the hidden states of which logits are wanted. Devices that share a shard add up what attention
    and MLPs made."""
    mixers, mlps = config.num_layers, config.num_layers + 1
    shares_shard = tp_size > config.attn_dp_size
    if packs_tokens:
        return {"all-reduce": (1 + shares_shard) * mixers + mlps, "all-gather": 2}
    sums = {"all-reduce": mixers + mlps} if shares_shard else {}
    return sums | {"all-gather": mixers + 2, "reduce-scatter": mlps}
