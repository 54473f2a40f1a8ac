"""Which matrices adapters may change, how an adapter goes into a slot, and which adapters are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft_adapters import load_adapted, make_adapter

from jaxserve.models import ModelConfig, abstract_params
from jaxserve.models.adapters.layout import AdapterLayout, check, check_targets
from jaxserve.models.adapters.peft_files import LowRank, PeftAdapter, read_adapter

Checkpoint = Callable[[str], Path]


def layout_of(model: Path, *, tp_size: int = 1, rank: int = 8, targets: tuple[str, ...] = ("all",)) -> AdapterLayout:
    config = ModelConfig.from_pretrained(str(model))
    arrays = abstract_params(config, np.float32, tp_size)
    return AdapterLayout.of(arrays, num_slots=2, rank=rank, dtype=np.float32, targets=targets)


def test_all_linear_modules_of_a_dense_model(checkpoint: Checkpoint) -> None:
    layers = layout_of(checkpoint("llama")).layers
    assert set(layers[0]) == {"attn.qkv", "attn.o", "mlp.gate_up", "mlp.down"}
    assert set(layout_of(checkpoint("llama")).modules) == {
        f"model.layers.{layer}.{name}_proj"
        for layer in layers
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # the latter's are tied
def test_embedding_and_output_head_only_if_named(checkpoint: Checkpoint, name: str) -> None:
    model = checkpoint(name)
    layout, config = layout_of(model, tp_size=2), ModelConfig.from_pretrained(str(model))
    assert layout.embed is None and layout.lm_head is None
    layout = layout_of(model, targets=("embed_tokens", "lm_head"))
    assert layout.modules == {
        "model.embed_tokens": (config.hidden_size, config.vocab_size),
        "lm_head": (config.vocab_size, config.hidden_size),
    }
    assert not any(layout.layers.values())


def test_neither_routers_nor_experts(checkpoint: Checkpoint) -> None:
    assert set(layout_of(checkpoint("qwen3-moe")).layers[0]) == {"attn.qkv", "attn.o"}


def test_targets_choose_matrices_and_unknown_ones_are_refused(checkpoint: Checkpoint) -> None:
    assert set(layout_of(checkpoint("llama"), targets=("v_proj", "down_proj")).layers[1]) == {"attn.qkv", "mlp.down"}
    with pytest.raises(ValueError, match="--lora-target-modules: the model has no module v_prj"):
        check_targets(abstract_params(ModelConfig.from_pretrained(str(checkpoint("llama"))), np.float32, 1), ("v_prj",))


@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_slot_holds_what_peft_adds(checkpoint: Checkpoint, tmp_path: Path, tp_size: int) -> None:
    """On four devices each of two KV heads is there twice."""
    model, targets = checkpoint("llama"), ["q_proj", "k_proj", "v_proj"]
    folder = make_adapter(model, tmp_path, seed=1, r=4, lora_alpha=12, target_modules=targets)
    layout, adapted = layout_of(model, tp_size=tp_size), load_adapted(model, folder)
    filled = layout.filled(read_adapter(str(folder))).layers[0]["attn.qkv"]
    attention = adapted.base_model.model.model.layers[0].self_attn
    for part, name in enumerate(targets):
        added = getattr(attention, name).get_delta_weight("default").detach().numpy()
        ours = (filled.a[:, part] @ filled.b[part]).T
        copies = 1 if name == "q_proj" or tp_size == 1 else 2
        heads = added.reshape(-1, 16, added.shape[1])  # head_dim
        np.testing.assert_allclose(ours, np.repeat(heads, copies, axis=0).reshape(-1, added.shape[1]), atol=1e-6)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"r": 16, "target_modules": ["q_proj"]}, "has rank 16 in .*layers.0.self_attn.q_proj; --max-lora-rank is 8"),
        ({"r": 2, "target_modules": ["o_proj"]}, "changes .*o_proj, which this server cannot"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    layout = layout_of(checkpoint("llama"), targets=("q_proj", "v_proj"))
    adapter = read_adapter(str(make_adapter(checkpoint("llama"), tmp_path, seed=0, **config)))
    with pytest.raises(ValueError, match=sentence):
        check(adapter, layout.modules, layout.rank, str(tmp_path))


def test_shapes_of_another_model_are_refused_with_both(checkpoint: Checkpoint) -> None:
    layout, name = layout_of(checkpoint("llama")), "model.layers.0.self_attn.q_proj"
    adapter = PeftAdapter({name: LowRank(np.ones((2, 128), np.float32), np.ones((64, 2), np.float32), 1.0)})
    with pytest.raises(
        ValueError, match=f"is of another model: its {name} goes from 128 to 64, that of the served one from 64"
    ):
        check(adapter, layout.modules, layout.rank, "folder")


def test_one_that_fits_is_taken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    layout = layout_of(model, targets=("q_proj", "v_proj"))
    make = functools.partial(make_adapter, model, seed=0)
    check(read_adapter(str(make(tmp_path, r=8, target_modules=["v_proj"]))), layout.modules, layout.rank, "")
