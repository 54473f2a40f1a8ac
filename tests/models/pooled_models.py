"""Tiny models that make vectors of texts, as Transformers and sentence-transformers write them, and their files by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checkpoints import make_tokenizer

from jaxserve.models import ModelConfig
from jaxserve.models.specs import NormSpec

HIDDEN, LABELS = 32, 3
ENCODER: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
DECODER: dict[str, Any] = {**ENCODER, "num_key_value_heads": 2, "head_dim": 8}
LAYER_NORM = NormSpec(eps=1e-5, subtracts_mean=True, bias=True)


def save_model(folder: Path, model_class: str, **kwargs: Any) -> Any:
    """A random model of Transformers in a folder, with a tokenizer, and the model."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, model_class)
    config = made.config_class(**kwargs)
    model = made(config).eval()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


def save_modules(
    folder: Path, behind: Callable[[Any], Sequence[Any]], *, max_len: int | None = None, **kwargs: Any
) -> list[Any]:
    """An encoder that sentence-transformers has written, and the modules behind it; `behind` is given its module classes."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    save_model(folder / "model", kwargs.pop("model_class", "BertModel"), **{**ENCODER, **kwargs})
    torch.manual_seed(1)
    made = [modules.Transformer(str(folder / "model"), max_seq_length=max_len), *behind(modules)]
    SentenceTransformer(modules=made, device="cpu").save(str(folder), create_model_card=False)
    shutil.rmtree(folder / "model")
    return made[1:]


def read(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig.from_pretrained(folder, **options)


def write(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_modules(folder: Path, *behind: tuple[str, dict[str, Any]]) -> None:
    """As sentence-transformers wrote them before its version 5."""
    listed = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    for index, (kind, config) in enumerate(behind, 1):
        own = folder / f"{index}_{kind}"
        own.mkdir(exist_ok=True)
        (own / "config.json").write_text(json.dumps(config))
        listed.append({"type": f"sentence_transformers.models.{kind}", "path": own.name})
    (folder / "modules.json").write_text(json.dumps(listed))
