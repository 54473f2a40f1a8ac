"""Attention over latents: keys and values of all heads are projections of one small vector per token, which is what is kept."""

from __future__ import annotations

import dataclasses

from jaxserve.kernels.spec import ProjectedHead
from jaxserve.models.rope_config import RopeConfig
from jaxserve.models.specs.checks import check_divides, check_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1), causal.

    A token's latent has a part that is projected to each head's key and value, and a part that is the rotated end of every
    head's key. Queries are projected by way of a latent of their own if `q_lora_rank` says how large.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int  # of a head's query and key: not rotated
    rope_dim: int  # of a head's query and key: rotated
    v_dim: int
    scale: float  # what q·k is multiplied with before the softmax
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim")
        if self.q_lora_rank is not None:
            check_sizes(self, "q_lora_rank")
        if self.rope_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even for rotary embeddings, got {self.rope_dim}.")

    def for_context(self, context_len: int) -> LatentAttentionSpec:
        return dataclasses.replace(self, rope=self.rope.for_context(context_len))

    # As a backend sees it: all heads read the same row of each token, whose first part is the value, too.

    num_kv_heads = 1
    window = kv_window = None
    is_causal = True
    is_chunked = False
    soft_cap = None
    sinks = False

    @property
    def head_dim(self) -> int:
        """Of a token's row."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Of the part of a row that is the value."""
        return self.kv_lora_rank

    @property
    def projected(self) -> ProjectedHead:
        """What a row is projected to for each head."""
        return ProjectedHead(self.nope_dim, self.rope_dim, self.v_dim)

    def check_tp(self, tp_size: int) -> None:
        """ValueError with both numbers if the heads cannot be split over `tp_size` devices."""
        check_divides("num_heads", self.num_heads, tp_size)
