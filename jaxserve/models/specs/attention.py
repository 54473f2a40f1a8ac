"""Attention with keys and values per head."""

from __future__ import annotations

import dataclasses

from jaxserve.models.rope_config import RopeConfig
from jaxserve.models.specs.checks import check_divides, check_sizes
from jaxserve.models.specs.norm import NormSpec

# head: each head by itself, all with the same weights; each_head, each_head_apart: with weights of its own, which checkpoints
# have in one tensor [heads, head_dim] or in one for each head; all_heads: over all of them together.
QK_NORMS = ("head", "each_head", "each_head_apart", "all_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemperatureTuning:
    """Queries grow with their position p: times 1 + strength * log(1 + floor((p + 1) / floor_scale))
    (https://arxiv.org/abs/2501.19399)."""

    floor_scale: float
    strength: float

    def __post_init__(self) -> None:
        if self.floor_scale <= 0:
            raise ValueError(f"floor_scale must be above 0, got {self.floor_scale}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAttentionSpec:
    """Attention with rotary positions (or without: `NO_ROPE`); several query heads share a key/value head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # what q·k is multiplied with before the softmax
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    is_causal: bool = True  # False: a token sees those behind it, too, and all tokens of a text are computed in one step
    # Tokens visible including the newest; None: all. Where attention is not causal, so many before and behind, itself included.
    window: int | None = None
    is_chunked: bool = False  # of the window, a token sees what lies in its own chunk: positions from a multiple of `window` on
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None  # of q and k, before rope
    qk_norm_over: str = "head"  # see QK_NORMS
    soft_cap: float | None = None  # c: a score s becomes c * tanh(s / c)
    sinks: bool = False  # a learned score per head that takes part in the softmax and has no value
    tuning: TemperatureTuning | None = None
    gates_output: bool = (
        False  # times a sigmoid that is projected as queries are; checkpoints have both in q_proj, head by head
    )

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}.")
        assert self.qk_norm_over in QK_NORMS, self.qk_norm_over
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}.")
        self.rope.check_head(self.head_dim)
        if self.window is not None and self.window < 1:
            name = "attention_chunk_size" if self.is_chunked else "sliding_window"
            raise ValueError(f"{name} must be at least 1 token, got {self.window}.")

    latent_dim = projected = None  # keys and values are kept, not latents

    @property
    def kv_window(self) -> int | None:
        """By which layers share a pool of pages: where attention is not causal nothing slides out of a window."""
        return self.window if self.is_causal else None

    @property
    def rope_dim(self) -> int:
        """Of a head: what cos and sin are made for."""
        return self.head_dim

    def for_context(self, context_len: int) -> SelfAttentionSpec:
        window = None if self.window is not None and self.window >= context_len else self.window
        is_chunked, rope = self.is_chunked and window is not None, self.rope.for_context(context_len)
        return dataclasses.replace(self, window=window, is_chunked=is_chunked, rope=rope)

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def check_tp(self, tp_size: int) -> None:
        """ValueError with both numbers if the heads cannot be split over `tp_size` devices."""
        check_divides("num_heads", self.num_heads, tp_size)
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ValueError(
                f"--tp-size must divide the model's num_kv_heads={self.num_kv_heads} or be a multiple of it; got {tp_size}."
            )
