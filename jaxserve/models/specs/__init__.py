"""What a decoder layer is: plain frozen values, one LayerSpec per layer. Sizes are those of the whole model.

A family (`families`) makes them from config.json, the block kinds (`blocks`) compute what they say. Nothing here imports JAX.
Layers whose specs are equal run the same program on other weights, so everything a layer's computation depends on is in here.
"""

from jaxserve.models.specs.attention import SelfAttentionSpec, TemperatureTuning
from jaxserve.models.specs.checks import ACTIVATIONS, check_activation, check_divides
from jaxserve.models.specs.embedding import EmbeddingSpec
from jaxserve.models.specs.latent_attention import LatentAttentionSpec
from jaxserve.models.specs.layer import AttentionMixer, LayerSpec, StateMixer
from jaxserve.models.specs.mlp import DenseMLPSpec
from jaxserve.models.specs.moe import ClampedSwiglu, MoESpec, RouterSpec
from jaxserve.models.specs.norm import NormSpec
from jaxserve.models.specs.pooling import POOLINGS, Activation, DenseSpec, Gives, PoolingSpec
from jaxserve.models.specs.states import GatedDeltaNetSpec, Mamba2Spec

__all__ = [
    "ACTIVATIONS",
    "POOLINGS",
    "Activation",
    "AttentionMixer",
    "ClampedSwiglu",
    "DenseMLPSpec",
    "DenseSpec",
    "EmbeddingSpec",
    "GatedDeltaNetSpec",
    "Gives",
    "LatentAttentionSpec",
    "LayerSpec",
    "Mamba2Spec",
    "MoESpec",
    "NormSpec",
    "PoolingSpec",
    "RouterSpec",
    "SelfAttentionSpec",
    "StateMixer",
    "TemperatureTuning",
    "check_activation",
    "check_divides",
]
