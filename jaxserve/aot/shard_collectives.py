"""Which collectives a forward program has: of a whole model (then also `hlo.expected_collectives`), or of a pipeline's stage.

Between stages there are none: hidden states are copied from devices to devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.models import ModelConfig


def expected_in_stage(config: ModelConfig, tp_size: int, *, packs_tokens: bool = False) -> Mapping[str, int]:
    """Two all-reduces per layer of the stage and one of the embedding where tokens are embedded, an all-gather of the logits
    where they are made. With attention by data parallelism what `expected_with_shards` says."""
    if tp_size == 1:
        return {}
    if config.attn_dp_size > 1:
        return expected_with_shards(config, tp_size, packs_tokens=packs_tokens)
    return _present({"all-reduce": 2 * len(config.own_layers) + config.embeds, "all-gather": int(config.makes_logits)})


def expected_with_shards(config: ModelConfig, tp_size: int, *, packs_tokens: bool) -> Mapping[str, int]:
    """`packs_tokens` as in Bucket. Tokens come together before each MLP, and are taken apart behind, as behind the embedding;
    brought together are also the hidden states of which logits are wanted. Devices that share a shard add up what attention
    and MLPs made."""
    mixers = len(config.own_layers)
    mlps = mixers + config.embeds
    of_logits = 2 * config.makes_logits
    shares_shard = tp_size > config.attn_dp_size
    if packs_tokens:
        return _present({"all-reduce": (1 + shares_shard) * mixers + mlps, "all-gather": of_logits})
    sums = {"all-reduce": mixers + mlps} if shares_shard else {}
    return _present(sums | {"all-gather": mixers + of_logits, "reduce-scatter": mlps})


def expected_of_context(config: ModelConfig, *, expands: bool) -> Mapping[str, int]:
    """What context parallelism (--dcp-size) adds: in each layer with latents, queries come together and what they found goes
    back; in steps of prompts (`expands`) some pages at a time come together, too."""
    layers = len(config.own_layers)
    return {"all-gather": layers * (2 if expands else 1), "all-to-all": layers}


def _present(counts: Mapping[str, int]) -> Mapping[str, int]:
    return {name: count for name, count in counts.items() if count}
