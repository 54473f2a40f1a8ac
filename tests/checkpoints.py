"""Tiny random checkpoints, written by Transformers, with a tokenizer beside them: what parity tests compare and servers serve.

`CASES` names them; `make_checkpoint(name, folder)` writes one. In tests use the session fixture `checkpoint`, which makes each
at most once: `checkpoint("llama") -> Path`. Weights are drawn wider than Transformers does, biases and norms too, so that every
array matters and the tokens differ.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

BOS, EOS, TURN = "<|begin|>", "<|end|>", "<|turn|>"
TOKENIZER_VOCAB = 300  # no case may have a smaller vocabulary

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog while the other dogs are watching the fox from the house.",
    "A server answers requests; a scheduler orders them; the model computes the next token of each of them.",
    "def add(left, right):\n    return left + right\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 你好，世界。 Привет, мир. 🙂",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration: the family (as in Transformers' class names) and what differs from `_BASE`."""

    family: str
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    takes_images: bool = False  # the language model is part of a larger one


_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


_TINY_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def _rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **params}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_GEMMA: dict[str, Any] = {
    "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA3: dict[str, Any] = {
    **_GEMMA,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": _rope("linear", factor=8.0) | {"rope_theta": 1e6},
        "sliding_attention": _rope("default"),
    },
}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}

CASES: dict[str, Case] = {
    "llama": Case("Llama"),
    "llama-biases": Case(
        "Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 80, "num_key_value_heads": 4, "vocab_size": 503}
    ),
    "llama-linear": Case("Llama", {"rope_parameters": _rope("linear", factor=2.0)}),
    "llama-dynamic": Case("Llama", {"rope_parameters": _rope("dynamic", factor=2.0), "max_position_embeddings": 64}),
    "llama-llama3": Case("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "head_dim": 64}),
    "llama-yarn": Case("Llama", {"rope_parameters": _YARN, "num_key_value_heads": 1}),
    "mistral": Case("Mistral", {"sliding_window": 8, "vocab_size": 503}),
    "mistral-full": Case("Mistral", {"sliding_window": None, "num_key_value_heads": 1, "head_dim": 64}),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-windows": Case("Qwen2", {**_QWEN_WINDOW, "vocab_size": 503}),
    "qwen2-yarn": Case("Qwen2", {"rope_parameters": _YARN, "num_key_value_heads": 1}),
    "qwen3": Case("Qwen3", {"head_dim": 64, "num_attention_heads": 8}),
    "qwen3-biases": Case("Qwen3", {**_QWEN_WINDOW, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 80}),
    "gemma2": Case("Gemma2", {**_GEMMA, "num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}),
    "gemma2-uncapped": Case(
        "Gemma2",
        {
            **_GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_key_value_heads": 1,
            "vocab_size": 503,
        },
    ),
    "gemma3": Case("Gemma3", {**_GEMMA3, "head_dim": 64, "num_attention_heads": 8}),
    "gemma3-images": Case("Gemma3", {**_GEMMA3, "attention_bias": True, "num_key_value_heads": 4}, takes_images=True),
    "qwen3-moe": Case("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-some-layers": Case(
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
}


def make_checkpoint(
    name: str, folder: Path, *, dtype: str = "float32", max_shard_size: str | int = "5GB", seed: int = 0
) -> Path:
    """Writes the checkpoint and tokenizer of CASES[name] into `folder` and returns it."""
    import torch

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = build_model(CASES[name], tokenizer.bos_token_id, tokenizer.eos_token_id).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder


def build_model(case: Case, bos_token_id: int | None = None, eos_token_id: int | None = None) -> Any:
    """The torch model of a case with fresh random weights, in evaluation mode."""
    import torch
    import transformers

    torch.set_num_threads(1)  # of so small a model, more threads only wait for each other
    kwargs = {**_BASE, **case.kwargs}
    if case.family == "Qwen2":  # has no head_dim option of its own: hidden_size / heads
        kwargs.pop("head_dim")
    config_class = getattr(transformers, "Gemma3TextConfig" if case.family == "Gemma3" else f"{case.family}Config")
    config = config_class(**kwargs, bos_token_id=bos_token_id, eos_token_id=eos_token_id)
    if case.takes_images:
        whole_class = getattr(transformers, f"{case.family}Config")
        config = whole_class(text_config=config, vision_config=_TINY_VISION, eos_token_id=eos_token_id)
    config._attn_implementation = "eager"
    model_class = f"{case.family}ForConditionalGeneration" if case.takes_images else f"{case.family}ForCausalLM"
    model = getattr(transformers, model_class)(config).eval()
    has_centered_norms = case.family.startswith("Gemma")  # they multiply with 1 + weight
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                mean = 0.0 if has_centered_norms or parameter_name.endswith("bias") else 1.0
                parameter.normal_(mean, 0.1)
    return model


def load_model(folder: Path) -> Any:
    """The torch model of a checkpoint folder in float32 with plain attention, in evaluation mode: the oracle."""
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer with a few merges, special tokens and a chat template; any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=[BOS, EOS, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
