"""A layer of a decoder or an encoder."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from jaxserve.models.specs.attention import SelfAttentionSpec
from jaxserve.models.specs.latent_attention import LatentAttentionSpec
from jaxserve.models.specs.mlp import DenseMLPSpec
from jaxserve.models.specs.moe import MoESpec
from jaxserve.models.specs.norm import NormSpec
from jaxserve.models.specs.states import GatedDeltaNetSpec, Mamba2Spec

AttentionMixer: TypeAlias = SelfAttentionSpec | LatentAttentionSpec
StateMixer: TypeAlias = GatedDeltaNetSpec | Mamba2Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A mixer (of tokens: attention, or what keeps a state), then an MLP, each on the residual stream and added to it."""

    mixer: AttentionMixer | StateMixer
    mlp: DenseMLPSpec | MoESpec
    norm: NormSpec = dataclasses.field(default_factory=NormSpec)
    norms_inputs: bool = True  # the mixer and the MLP read the normed stream
    norms_mixer_input: bool = True  # False: of these two only the MLP does
    norms_outputs: bool = False  # the mixer's and the MLP's outputs are normed before they are added
    norms_sums: bool = False  # the stream is normed behind each addition (post-norm)
    is_parallel: bool = False  # the MLP reads what the mixer reads, through one norm
    residual_scale: float = 1.0  # what outputs are multiplied with before they are added

    def __post_init__(self) -> None:
        assert not (self.norms_outputs and self.norms_sums), self

    def for_context(self, context_len: int) -> LayerSpec:
        """For sequences of at most `context_len` tokens: a window that none of them outgrows is none, and rope is theirs."""
        return dataclasses.replace(self, mixer=self.mixer.for_context(context_len))

    def check_tp(self, tp_size: int, attn_dp_size: int = 1) -> None:
        """ValueError with both numbers if it cannot be split over `tp_size` devices, in groups with attention of their own."""
        try:
            self.mixer.check_tp(tp_size // attn_dp_size)
        except ValueError as error:
            if attn_dp_size == 1:
                raise
            raise ValueError(f"{error} (--tp-size {tp_size} over --attn-dp-size {attn_dp_size})") from error
        self.mlp.check_tp(tp_size)
