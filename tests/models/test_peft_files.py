"""Adapters that PEFT wrote, read as PEFT reads them; and what is said of those that are damaged or more than LoRA."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import peft
import pytest
import torch
from checkpoints import build_model
from model_families import CASES
from safetensors.torch import load_file, save_file

from jaxserve.models.adapters.peft_files import largest_rank, read_adapter, read_config, target_suffixes

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT's, for each adapter of an embedding

Q0 = "model.layers.0.self_attn.q_proj"
Q0_A, Q0_B = f"base_model.model.{Q0}.lora_A.weight", f"base_model.model.{Q0}.lora_B.weight"


@pytest.fixture(scope="module")
def base() -> Any:
    torch.manual_seed(0)
    return build_model(CASES["llama"])


def save_adapter(base: Any, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Writes an adapter with random matrices and returns PEFT's model."""
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn_like(parameter).to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def saved(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("adapter")
    save_adapter(base, folder, r=4, target_modules=["q_proj", "v_proj"])
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A plain adapter, for a test to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_tensors(folder: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    file = folder / "adapter_model.safetensors"
    changed = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)


def says(sentence: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(sentence))


PATTERNS = {
    "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.(up|down)_proj": 6, "^model.layers.0.self_attn.v_proj": 3},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 5, "self_attn.q_proj": 7, "_proj": 100, "down_proj": 9},
}
ALL = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
WRITTEN: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "defaults": {"target_modules": ["gate_proj"]},
    "rank-stabilized": {"r": 5, "lora_alpha": 3, "use_rslora": True, "target_modules": ["o_proj"]},
    "patterns": {"r": 4, "lora_alpha": 16, "target_modules": ALL, **PATTERNS},
    "patterns-rank-stabilized": {"r": 8, "use_rslora": True, "target_modules": ALL, **PATTERNS},
    "regex": {"r": 1, "target_modules": r".*\.1\.mlp\.(gate|up)_proj"},
    "all-linear": {"r": 2, "target_modules": "all-linear"},
    "some-layers": {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [1]},
    "embeddings": {"r": 3, "lora_alpha": 5, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "embeddings-alone": {"r": 3, "use_rslora": True, "target_modules": ["embed_tokens"]},
    "other-start": {"r": 4, "init_lora_weights": "orthogonal", "target_modules": ["q_proj"], "lora_dropout": 0.1},
    "bfloat16": {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "dtype": torch.bfloat16},
    "float16": {"r": 4, "target_modules": ["q_proj"], "dtype": torch.float16},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_module_changes_as_by_peft(name: str, base: Any, tmp_path: Path) -> None:
    model = save_adapter(base, tmp_path, **WRITTEN[name])
    adapter = read_adapter(str(tmp_path))
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert layers and adapter.modules.keys() == layers.keys()
    for module, layer in layers.items():
        ours = adapter.modules[module]
        assert ours.is_embedding == isinstance(layer, peft.tuners.lora.Embedding)
        assert ours.rank == layer.r["default"] and ours.scale == layer.scaling["default"]
        delta = ours.scale * (ours.b.astype(np.float32) @ ours.a.astype(np.float32))
        theirs = layer.float().get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(delta.T if ours.is_embedding else delta, theirs, rtol=1e-5, atol=1e-5)
    assert adapter.rank == largest_rank(str(tmp_path)) == max(layer.r["default"] for layer in layers.values())
    assert target_suffixes(str(tmp_path)) == {module.split(".")[-1] for module in layers}


def test_arrays_keep_the_type_of_the_file(base: Any, tmp_path: Path) -> None:
    save_adapter(base, tmp_path, torch.bfloat16, r=4, target_modules=["q_proj"])
    q_proj = read_adapter(str(tmp_path)).modules[Q0]
    assert q_proj.a.dtype == q_proj.b.dtype == ml_dtypes.bfloat16
    assert q_proj.a.shape == (4, 64) and q_proj.b.shape == (64, 4)


def test_config(base: Any, tmp_path: Path) -> None:
    save_adapter(base, tmp_path, r=4, lora_alpha=16, target_modules=ALL, **PATTERNS)
    config = read_config(str(tmp_path))
    assert isinstance(config.target_modules, tuple) and sorted(config.target_modules) == sorted(ALL)
    assert (config.r, config.rank, config.lora_alpha, config.use_rslora) == (4, 6, 16.0, False)
    assert config.rank_of(Q0) == 2 and config.scale_of(Q0) == 5 / 2
    change_config(tmp_path, target_modules="all-linear", of_a_later_peft={"x": 1})
    assert read_config(str(tmp_path)).target_modules == "all-linear"


def test_names_with_the_adapter_s_name(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    named = {re.sub(r"\.weight$", ".default.weight", name): tensor for name, tensor in tensors.items()}
    before = read_adapter(str(folder))
    save_file(named, folder / "adapter_model.safetensors")
    assert read_adapter(str(folder)).modules.keys() == before.modules.keys()
    change_tensors(folder, {Q0_A: tensors[Q0_A]})
    with says(f"tensors {Q0_A.replace('.weight', '.default.weight')} and {Q0_A} are both lora_A of one module."):
        read_adapter(str(folder))


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq"])
def test_training_that_began_by_changing_the_base_is_refused(folder: Path, start: str) -> None:
    """PEFT changes the base again when it loads such an adapter; converted ones say true."""
    change_config(folder, init_lora_weights=start)
    with pytest.raises(ValueError, match=f'init_lora_weights is "{start}", with which training changes the base weights'):
        read_config(str(folder))


MORE_THAN_LORA = [
    ("use_dora", True, "DoRA"),
    ("use_qalora", True, "QALoRA"),
    ("use_bdlora", {"nblocks": 2}, "block-diagonal LoRA"),
    ("kasa_config", {"beta": 0.1}, "KaSA"),
    ("velora_config", {"num_groups": 4}, "VeLoRA"),
    ("monteclora_config", {"num_samples": 8}, "Monte Carlo LoRA"),
    ("arrow_config", {"top_k": 3}, "Arrow routing"),
    ("alora_invocation_tokens", [1, 2], "activated LoRA"),
    ("modules_to_save", ["lm_head"], "replacing whole modules"),
    ("trainable_token_indices", [5], "replacing embeddings of single tokens"),
    ("target_parameters", ["experts.down_proj"], "changing parameters of modules without a LoRA layer"),
    ("layer_replication", [[0, 2]], "repeating layers"),
    ("lora_bias", True, "a bias beside lora_B"),
    ("fan_in_fan_out", True, "a base weight stored as [in, out]"),
]


@pytest.mark.parametrize(("field", "value", "method"), MORE_THAN_LORA)
def test_more_than_lora(field: str, value: Any, method: str, folder: Path) -> None:
    change_config(folder, **{field: value})
    file = folder / "adapter_config.json"
    with says(f"{file}: {field} is {json.dumps(value)}, but {method} is not supported."):
        read_adapter(str(folder))


def test_variants_of_peft_are_all_known() -> None:
    """A new kind of LoRA in a later PEFT must be looked at."""
    variants = {field.name for field in dataclasses.fields(peft.LoraConfig) if field.metadata.get("is_lora_variant")}
    assert variants <= {field for field, _, _ in MORE_THAN_LORA}


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("peft_type", "IA3", 'peft_type is "IA3", but must be "LORA".'),
        ("peft_type", None, 'peft_type is null, but must be "LORA".'),
        ("bias", "lora_only", 'bias is "lora_only", but must be "none": trained biases are not supported.'),
        ("modules_to_save", ["x" * 300], f'modules_to_save is ["{"x" * 198}..., but'),
        ("r", 0, "r has 0 as a rank, which must be an integer of at least 1."),
        ("r", "8", 'r has "8" as a rank, which must be'),
        ("r", True, "r has true as a rank, which must be"),
        ("lora_alpha", None, "lora_alpha has null as alpha, which must be a finite number."),
        ("lora_alpha", float("nan"), "lora_alpha has NaN as alpha, which must be"),
        ("lora_alpha", 10**400, "as alpha, which must be"),
        ("rank_pattern", {"q_proj": 1.5}, "rank_pattern has 1.5 as a rank, which must be"),
        ("alpha_pattern", {"q_proj": "x"}, 'alpha_pattern has "x" as alpha, which must be'),
        ("rank_pattern", [1], "rank_pattern is [1], but must be an object of patterns."),
        ("alpha_pattern", {"(": 1}, 'alpha_pattern has the pattern "(", which must be a regular expression: '),
    ],
)
def test_fields_of_the_config(field: str, value: Any, sentence: str, folder: Path) -> None:
    change_config(folder, **{field: value})
    with says(sentence):
        read_config(str(folder))


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000], ids=["cut off", "not UTF-8", "deep"])
def test_damaged_config(text: bytes, folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(text)
    with says(f"{folder / 'adapter_config.json'} cannot be read as JSON: "):
        read_adapter(str(folder))


def test_config_that_is_no_object(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")
    with says("adapter_config.json must hold a JSON object."):
        read_adapter(str(folder))


def test_missing_files(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    sentence = f"{folder} holds no adapter_model.safetensors, which an adapter needs."
    hint = " It holds adapter_model.bin, which is not read; convert it to safetensors."
    for read in (read_adapter, target_suffixes, largest_rank):
        with says(sentence + hint):
            read(str(folder))
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ValueError, match=re.escape(sentence) + "$"):
        read_adapter(str(folder))
    (folder / "adapter_config.json").unlink()
    with says(f"{folder} holds no adapter_config.json, which an adapter needs."):
        read_adapter(str(folder))
    with says("nowhere is not a folder; an adapter must be a folder with adapter_config.json and adapter_model.safetensors."):
        read_adapter(str(folder / "nowhere"))


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_damaged_weights(kept: int, folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    for read in (read_adapter, target_suffixes, largest_rank):
        with says(f"{file} ({file.stat().st_size} bytes) is cut off or not a safetensors file: "):
            read(str(folder))


OTHER = "is not lora_A or lora_B of a module; adapters with other tensors are not supported."
NOT_FINITE = torch.full((4, 64), 1.0)
NOT_FINITE[3, 5] = float("nan")


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({Q0_B: None}, f"module {Q0} has lora_A; it must have lora_A and lora_B, or lora_embedding_A and lora_embedding_B."),
        ({Q0_A: None}, f"module {Q0} has lora_B; it must have"),
        ({f"base_model.model.{Q0}.lora_embedding_A": torch.ones(4, 9)}, "has lora_A and lora_B and lora_embedding_A; it"),
        ({Q0_A: torch.ones(3, 64)}, "have shapes [3, 64] and [64, 4]; they must be [rank, in] and [out, rank]."),
        ({Q0_A: torch.ones(4, 64, 1, 1)}, "have shapes [4, 64, 1, 1] and [64, 4]; they"),
        ({Q0_A: torch.ones(0, 64), Q0_B: torch.ones(64, 0)}, "have shapes [0, 64] and [64, 0]; they"),
        (
            {Q0_A: torch.ones(2, 64), Q0_B: torch.ones(64, 2)},
            f"module {Q0} has rank 2, but adapter_config.json says 4; the scale depends on it.",
        ),
        ({Q0_A: torch.ones(4, 64, dtype=torch.int8)}, f"{Q0_A} has type I8; types that can be read: F64, F32, F16, BF16."),
        ({Q0_A: NOT_FINITE}, f"tensor {Q0_A} holds NaN or infinity."),
        ({Q0_A: NOT_FINITE.bfloat16()}, f"tensor {Q0_A} holds NaN or infinity."),
        ({Q0_B: torch.full((64, 4), float("inf"))}, f"tensor {Q0_B} holds NaN or infinity."),
        ({f"base_model.model.{Q0}.lora_B.bias": torch.ones(64)}, f"tensor base_model.model.{Q0}.lora_B.bias {OTHER}"),
        ({f"base_model.model.{Q0}.lora_magnitude_vector": torch.ones(64)}, OTHER),
        ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, f"tensor base_model.model.lm_head.weight {OTHER}"),
        ({"base_model.model.lm_head.base_layer.weight": torch.ones(2, 2)}, OTHER),
        ({f"{Q0}.lora_A.weight": torch.ones(4, 64)}, f"tensor {Q0}.lora_A.weight {OTHER}"),
    ],
)
def test_tensors(tensors: dict[str, torch.Tensor | None], sentence: str, folder: Path) -> None:
    change_tensors(folder, tensors)
    with says(sentence):
        read_adapter(str(folder))


def test_no_tensors(folder: Path) -> None:
    save_file({}, folder / "adapter_model.safetensors")
    with says("adapter_model.safetensors holds no tensors; an adapter needs lora_A and lora_B of at least one module."):
        target_suffixes(str(folder))
