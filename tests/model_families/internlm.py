"""InternLM 2, which Transformers does not know (a Llama in other tensors), and InternLM 3, which it has as a Llama."""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served, rope

_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}


def _as_internlm2(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Heads of q, k and v stand together by the key/value head they go with."""
    import torch

    def wqkv(prefix: str, kind: str) -> Any:
        q, k, v = (
            tensors.pop(f"{prefix}.{name}_proj.{kind}").unflatten(0, (raw["num_key_value_heads"], -1, raw["head_dim"]))
            for name in "qkv"
        )
        return torch.cat([q, k, v], dim=1).flatten(0, 2)

    found: dict[str, Any] = {}
    for layer in range(raw["num_hidden_layers"]):
        for kind in ("weight", "bias") if raw["attention_bias"] else ("weight",):
            prefix = f"model.layers.{layer}"
            found[f"{prefix}.attention.wqkv.{kind}"] = wqkv(f"{prefix}.self_attn", kind)
    for name, tensor in tensors.items():
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        found[name] = tensor
    params = raw.pop("rope_parameters")
    scaling = None if params["rope_type"] == "default" else {"type": params["rope_type"], "factor": params["factor"]}
    named = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": raw.pop("attention_bias")}
    return {**raw, **named, "rope_theta": params["rope_theta"], "rope_scaling": scaling}, found


def _as_internlm3(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    biases = {"qkv_bias": any(name.endswith("q_proj.bias") for name in tensors), "bias": bool(raw.pop("mlp_bias", False))}
    raw.pop("attention_bias", None)
    return {**raw, **biases, "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}, tensors


CASES: dict[str, Case] = {
    "internlm2": Case("Llama", {"num_attention_heads": 8}, rewrite=_as_internlm2),
    "internlm2-biases": Case(
        "Llama",
        {
            "attention_bias": True,
            "num_key_value_heads": 4,
            "vocab_size": 503,
            "head_dim": 24,
            "rope_parameters": rope("dynamic", factor=2.0),
        },
        rewrite=_as_internlm2,
    ),
    "internlm3": Case("Llama", {"num_key_value_heads": 1, "head_dim": 32}, rewrite=_as_internlm3),
    "internlm3-biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}, rewrite=_as_internlm3),
    # Of Transformers' models, Qwen2 has biases of q, k and v alone.
    "internlm3-qkv-bias": Case("Qwen2", {"vocab_size": 503}, without=("head_dim",), rewrite=_as_internlm3),
}
IN_PROCESS = [
    Served("internlm2", page_size=16, chunk=32, tp=4, mixed=True, in_matrix=True),
]
