"""What a decoder layer is: plain frozen values, one LayerSpec per layer. Sizes are those of the whole model.

A family (`families`) makes them from config.json, the block kinds (`blocks`) compute what they say. Nothing here imports JAX.
Layers whose specs are equal run the same program on other weights, so everything a layer's computation depends on is in here.
"""

from __future__ import annotations

import dataclasses

from jaxserve.models.rope_config import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A root-mean-square norm."""

    eps: float = 1e-6
    counts_from_one: bool = False  # the factor is 1 + the checkpoint's weight, and the product is float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAttentionSpec:
    """Causal attention with rotary positions; several query heads share a key/value head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # what q·k is multiplied with before the softmax
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    window: int | None = None  # tokens visible including the newest; None: all
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None  # over head_dim on q and k, before rope
    soft_cap: float | None = None  # c: a score s becomes c * tanh(s / c)
    sinks: bool = False  # a learned score per head that takes part in the softmax and has no value

    def __post_init__(self) -> None:
        _check_sizes(self, "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding_window must be at least 1 token, got {self.window}.")

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseMLPSpec:
    """down(act(gate(x)) * up(x))."""

    intermediate_size: int
    act: str = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self, "intermediate_size")
        check_activation(self.act)

    def check_tp(self, tp_size: int) -> None:
        """ValueError with both numbers if the columns cannot be split over `tp_size` devices."""
        check_divides("intermediate_size", self.intermediate_size, tp_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A router sends each token to some experts, each of them a dense MLP without biases, and weighs what they answer."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    act: str = "silu"
    normalizes_weights: bool = False  # the chosen experts' probabilities are divided by their sum

    def __post_init__(self) -> None:
        _check_sizes(self, "num_experts", "experts_per_token", "intermediate_size")
        check_activation(self.act)
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.experts_per_token} must not exceed num_experts={self.num_experts}.")

    def check_tp(self, tp_size: int) -> None:
        """ValueError with both numbers if the experts cannot be dealt out to `tp_size` devices."""
        check_divides("num_experts", self.num_experts, tp_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Attention, then MLP, each on the normed residual stream and added to it."""

    attention: SelfAttentionSpec
    mlp: DenseMLPSpec | MoESpec
    norm: NormSpec = dataclasses.field(default_factory=NormSpec)
    norms_outputs: bool = False  # attention's and the MLP's outputs are normed, too, before they are added

    def for_context(self, context_len: int) -> LayerSpec:
        """For sequences of at most `context_len` tokens: a window that none of them outgrows is none."""
        window = self.attention.window
        if window is None or window < context_len:
            return self
        return dataclasses.replace(self, attention=dataclasses.replace(self.attention, window=None))

    def check_tp(self, tp_size: int) -> None:
        self.attention.check_tp(tp_size)
        self.mlp.check_tp(tp_size)


def check_divides(name: str, value: int, tp_size: int) -> None:
    if value % tp_size:
        raise ValueError(f"--tp-size must divide the model's {name}={value}; got {tp_size}.")


def check_activation(act: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}; got {act!r}.")


def _check_sizes(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
