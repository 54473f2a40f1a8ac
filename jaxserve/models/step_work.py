"""What tokens and pairs of tokens take to compute, from a model's numbers alone.

A token is multiplied with matrices, whatever stands before it, and attends to the tokens that it sees. Work is counted in
multiplications (with an addition each) of the whole model; output heads are left out, since prompts need them for one token.
"""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.models.specs import (
    AttentionMixer,
    DenseMLPSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MoESpec,
    SelfAttentionSpec,
    StateMixer,
)


def attention_work_ratio(config: ModelConfig) -> float:
    """How the work that a prompt's token brings grows with its place: behind L tokens it is 1 + L times this number, in what it
    is for the first. Layers with a window do not grow once it is full, and count as if it were; nor do those that keep states.
    0: nothing grows."""
    token = sum(
        _mixer_work(layer.mixer, config.hidden_size) + _mlp_work(layer.mlp, config.hidden_size) for layer in config.layers
    )
    token += sum(_pair_work(mixer) * _seen_in_window(mixer) for mixer in config.attention)
    pairs = sum(_pair_work(mixer) for mixer in config.attention if mixer.window is None)
    return pairs / token


def _pair_work(mixer: AttentionMixer) -> int:
    """Of a query and a key with its value, in all heads: of prompts' steps, which project latents to both."""
    if isinstance(mixer, LatentAttentionSpec):
        return mixer.num_heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
    return mixer.num_heads * 2 * mixer.head_dim


def _seen_in_window(mixer: AttentionMixer) -> int:
    """Tokens, on average; 0 without a window."""
    if mixer.window is None:
        return 0
    return mixer.window // 2 if mixer.is_chunked else mixer.window


def _mixer_work(mixer: AttentionMixer | StateMixer, hidden_size: int) -> int:
    match mixer:
        case SelfAttentionSpec():
            queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            return hidden_size * (queries * (2 + mixer.gates_output) + 2 * keys)
        case LatentAttentionSpec():
            queries = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim)
            rank = mixer.q_lora_rank
            to_queries = hidden_size * queries if rank is None else rank * (hidden_size + queries)
            from_latents = mixer.kv_lora_rank * mixer.num_heads * (mixer.nope_dim + mixer.v_dim)
            return to_queries + hidden_size * mixer.head_dim + from_latents + hidden_size * mixer.num_heads * mixer.v_dim
        case GatedDeltaNetSpec():
            keys, values = mixer.num_key_heads * mixer.key_dim, mixer.num_value_heads * mixer.value_dim
            return hidden_size * (2 * keys + 3 * values + 2 * mixer.num_value_heads)
        case Mamba2Spec():
            inputs = 2 * mixer.inner_size + 2 * mixer.num_groups * mixer.state_dim + mixer.num_heads
            return hidden_size * (inputs + mixer.inner_size)


def _mlp_work(mlp: DenseMLPSpec | MoESpec, hidden_size: int) -> int:
    """Of a mixture: the experts that a token goes to."""
    if isinstance(mlp, DenseMLPSpec):
        return hidden_size * mlp.intermediate_size * (3 if mlp.is_gated else 2)
    experts = hidden_size * (mlp.num_experts + 3 * mlp.experts_per_token * mlp.intermediate_size)
    return experts + (0 if mlp.shared is None else _mlp_work(mlp.shared, hidden_size))
