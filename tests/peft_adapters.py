"""LoRA adapters made by PEFT for the tiny checkpoints, with random weights, and PEFT's own model of each: the oracle."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints import load_model


def make_adapter(
    model: Path, folder: Path, *, seed: int, std: float = 0.1, base: Any = None, task: str = "CAUSAL_LM", **config: Any
) -> Path:
    """Writes an adapter with these fields of PEFT's LoraConfig into `folder` and returns it. Neither A nor B is zero, and the
    larger `std`, the more it changes. `base`: the torch model, if it is not one that generates; it is changed."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with _quiet_peft():
        adapted = get_peft_model(base or load_model(model), LoraConfig(task_type=task, **config))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(std=std)
        adapted.save_pretrained(folder, save_embedding_layers=False)  # which the base has
    return folder


def load_adapted(model: Path, adapter: Path) -> Any:
    """As `load_model`, with the adapter."""
    from peft import PeftModel

    with _quiet_peft():
        return PeftModel.from_pretrained(load_model(model), adapter).eval()


@contextlib.contextmanager
def _quiet_peft() -> Iterator[None]:
    """PEFT 0.21 does, of Transformers 5.24; and it warns of adapters of what is tied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
        yield
