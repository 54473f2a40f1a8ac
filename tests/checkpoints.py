"""Tiny random checkpoints, written by Transformers, with a tokenizer beside them: what parity tests compare and servers serve.

`model_families.CASES` names them; `make_checkpoint(name, folder)` writes one. In tests use the session fixture `checkpoint`,
which makes each at most once: `checkpoint("llama") -> Path`. Weights are drawn wider than Transformers does, biases and norms
too, so that every array matters and the tokens differ. What a case rewrites stays in a folder within.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_families import CASES, ENCODERS, Case
from model_families.case import Rewrite

BOS, EOS, TURN = "<|begin|>", "<|end|>", "<|turn|>"
ORACLE = "oracle"  # folder of what Transformers reads, where the checkpoint is of another form
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


def make_checkpoint(
    name: str, folder: Path, *, dtype: str = "float32", max_shard_size: str | int = "5GB", seed: int = 0
) -> Path:
    """Writes the checkpoint and tokenizer of CASES[name] or ENCODERS[name] into `folder` and returns it."""
    import torch

    tokenizer, case = make_tokenizer(), {**CASES, **ENCODERS}[name]
    torch.manual_seed(seed)
    model = build_model(case, tokenizer.bos_token_id, tokenizer.eos_token_id).to(getattr(torch, dtype))
    model.save_pretrained(folder if case.rewrite is None else folder / ORACLE, max_shard_size=max_shard_size)
    if case.rewrite is not None:
        _rewrite(folder, case.rewrite)
    tokenizer.save_pretrained(folder)
    return folder


def _rewrite(folder: Path, rewrite: Rewrite) -> None:
    from safetensors.torch import load_file, save_file

    raw = json.loads((folder / ORACLE / "config.json").read_text())
    raw, tensors = rewrite(raw, load_file(folder / ORACLE / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def build_model(case: Case, bos_token_id: int | None = None, eos_token_id: int | None = None) -> Any:
    """The torch model of a case with fresh random weights, in evaluation mode."""
    import torch
    import transformers

    torch.set_num_threads(1)  # of so small a model, more threads only wait for each other
    kwargs = {name: value for name, value in {**_BASE, **case.kwargs}.items() if name not in case.without}
    config_class = getattr(transformers, case.config_class or f"{case.family}Config")
    config = config_class(**kwargs, bos_token_id=bos_token_id, eos_token_id=eos_token_id)
    if case.takes_images:
        whole_class = getattr(transformers, f"{case.family}Config")
        config = whole_class(text_config=config, vision_config=_TINY_VISION, eos_token_id=eos_token_id)
    config._attn_implementation = "eager"
    head = "Model" if case.is_encoder else "ForConditionalGeneration" if case.takes_images else "ForCausalLM"
    model = getattr(transformers, f"{case.family}{head}")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                mean = 0.0 if case.has_centered_norms or parameter_name.endswith("bias") else 1.0
                parameter.normal_(mean, 0.1)
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.1)
        if case.prepare is not None:
            case.prepare(model)
    return model


def load_model(folder: Path) -> Any:
    """The torch model of a checkpoint folder in float32 with plain attention, in evaluation mode: the oracle."""
    import torch
    import transformers

    torch.set_num_threads(1)
    folder = folder / ORACLE if (folder / ORACLE).is_dir() else folder
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    auto = transformers.AutoModel if architecture.endswith("Model") else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


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
