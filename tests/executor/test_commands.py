"""Commands to a real runner: other weights give exactly a fresh runner's tokens, what fails changes nothing, memory is flat."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from checkpoints import make_checkpoint
from commanded_runner import (
    PROMPTS,
    build_small,
    execute,
    generate,
    live_bytes,
    loader_of,
    refusal,
    replace,
    tokens_of,
)
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jaxserve.commands import CheckWeights, ReleaseMemory, ReplaceWeights, ResumeMemory
from jaxserve.executor import ModelRunner
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.warmup import CompileCounter
from jaxserve.executor.weights import WeightLoader
from jaxserve.models import TENSOR_AXIS, ModelConfig, convert
from jaxserve.models.safetensors_files import SafetensorsCheckpoint


@pytest.fixture(scope="module")
def old(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelRunner]:
    return functools.partial(build_small, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def runner(build: Callable[..., ModelRunner], old: Path) -> ModelRunner:
    return build(old)


@pytest.fixture(scope="module")
def old_tokens(runner: ModelRunner) -> list[list[int]]:
    return tokens_of(runner)


@pytest.fixture(scope="module")
def new_tokens(build: Callable[..., ModelRunner], new: Path, old_tokens: list[list[int]]) -> list[list[int]]:
    tokens = tokens_of(build(new))
    assert tokens != old_tokens
    return tokens


@pytest.fixture
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are replaced as they are there, over copies in the host's memory."""
    monkeypatch.setattr(WeightLoader, "loads_beside", False)


def damaged(source: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A copy of a checkpoint whose tensors were changed."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_other_weights_give_the_tokens_of_a_fresh_runner(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    replace(runner, new)
    assert tokens_of(runner) == new_tokens
    replace(runner, old, "safetensors")
    assert tokens_of(runner) == old_tokens


def test_the_way_over_the_host(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]], on_accelerator: None
) -> None:
    """Also back, when loading fails half-way: there is only one set of weights on the devices at any time."""
    before = live_bytes()
    replace(runner, new)
    assert tokens_of(runner) == new_tokens
    replace(runner, old)
    with failing_reads(after=5):
        message = refusal(runner, ReplaceWeights(str(new), "auto"))
    assert "the disk is gone" in message and "The weights are still the old ones." in message
    assert tokens_of(runner) == old_tokens
    assert live_bytes() == before


def test_the_host_has_no_room_for_a_second_set(
    runner: ModelRunner, new: Path, old_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightLoader, "fits_on_host", lambda loader, params: False)
    assert "Release the weights first" in refusal(runner, ReplaceWeights(str(new), "auto"))
    assert tokens_of(runner) == old_tokens


def test_loading_that_fails_half_way_leaves_the_old_weights(
    runner: ModelRunner, new: Path, old_tokens: list[list[int]]
) -> None:
    before = live_bytes()
    with failing_reads(after=5):
        assert "the disk is gone" in refusal(runner, ReplaceWeights(str(new), "auto"))
    assert tokens_of(runner) == old_tokens
    assert live_bytes() == before


def remove_a_tensor(tensors: dict[str, np.ndarray]) -> None:
    del tensors["model.layers.1.mlp.down_proj.weight"]


def change_a_shape(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def change_a_type(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove_a_tensor, "tensor model.layers.1.mlp.down_proj.weight is missing"),
        (change_a_shape, "tensor model.norm.weight has shape [63], but config.json asks for [64]"),
        (change_a_type, "tensor model.norm.weight has type I32"),
    ],
)
def test_a_tensor_that_is_wrong_is_named_and_nothing_changes(
    runner: ModelRunner, new: Path, old_tokens: list[list[int]], tmp_path: Path, change: Any, says: str
) -> None:
    folder = str(damaged(new, tmp_path / "damaged", change))
    for command in (CheckWeights(folder, "auto"), ReplaceWeights(folder, "auto")):
        assert says in refusal(runner, command)
    assert tokens_of(runner) == old_tokens


def test_another_model_is_refused_by_what_differs(
    runner: ModelRunner, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    assert "architecture is 'LlamaForCausalLM'" in refusal(runner, CheckWeights(str(checkpoint("llama")), "auto"))
    folder = tmp_path / "other"
    shutil.copytree(checkpoint("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    message = refusal(runner, CheckWeights(str(folder), "auto"))
    assert "layers.0.mixer.num_kv_heads is 4, that of the served one 2" in message
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    assert "number of layers is 1, that of the served one 2" in refusal(runner, CheckWeights(str(folder), "auto"))


@pytest.mark.parametrize(
    ("path", "load_format", "says"),
    [
        ("/nowhere", "auto", "model_path '/nowhere' is not a folder."),
        ("", "auto", "model_path '' is not a folder."),
        (None, "pickle", "got 'pickle'"),
        (None, "orbax", "does not exist; write it with `jaxserve convert`"),
    ],
)
def test_bad_paths_and_formats(runner: ModelRunner, new: Path, path: str | None, load_format: str, says: str) -> None:
    assert says in refusal(runner, CheckWeights(str(new) if path is None else path, load_format))


def test_a_file_that_is_cut_off_is_named(runner: ModelRunner, new: Path, old_tokens: list[list[int]], tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(new, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "is cut off" in refusal(runner, ReplaceWeights(str(folder), "auto"))
    assert tokens_of(runner) == old_tokens


def test_an_orbax_folder(runner: ModelRunner, old: Path, new: Path, new_tokens: list[list[int]], tmp_path: Path) -> None:
    folder = convert(new, tmp_path / "converted", progress=False)
    execute(runner, CheckWeights(str(folder), "auto"))
    replace(runner, folder)
    assert tokens_of(runner) == new_tokens
    replace(runner, old)


def test_fifty_updates_leave_memory_flat(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    def update_twice() -> None:
        replace(runner, new)
        replace(runner, old)

    for _ in range(3):
        update_twice()
    bytes_before, resident_before = live_bytes(), psutil.Process().memory_info().rss
    for _ in range(25):
        update_twice()
    assert live_bytes() == bytes_before
    assert psutil.Process().memory_info().rss - resident_before < 24 << 20
    assert tokens_of(runner) == old_tokens
    replace(runner, new)
    assert tokens_of(runner) == new_tokens
    replace(runner, old)


def test_memory_is_released_and_resumed(runner: ModelRunner, old_tokens: list[list[int]]) -> None:
    whole = runner.internal_state()["memory_usage"]
    before = live_bytes()
    for tags in (("kv_cache",), ("weights",), ("weights", "kv_cache")):
        execute(runner, ReleaseMemory(tags))
        usage = runner.internal_state()["memory_usage"]
        names = {"weights": "weight_gb", "kv_cache": "kvcache_gb"}
        assert all(usage[name] == (0 if tag in tags else whole[name]) for tag, name in names.items())
        assert live_bytes() == before - round(sum(whole[names[tag]] for tag in tags) * 1e9)
        execute(runner, ResumeMemory(tags))
        assert runner.internal_state()["memory_usage"] == whole
        assert tokens_of(runner) == old_tokens
    assert live_bytes() == before


def test_release_and_resume_in_the_wrong_state_change_nothing(runner: ModelRunner, old_tokens: list[list[int]]) -> None:
    assert refusal(runner, ResumeMemory(("kv_cache",))) == "kv_cache is not released."
    execute(runner, ReleaseMemory(("kv_cache",)))
    assert refusal(runner, ReleaseMemory(("weights", "kv_cache"))) == "kv_cache is released already."
    assert refusal(runner, ResumeMemory(("weights", "kv_cache"))) == "weights is not released."
    with pytest.raises(AssertionError, match="memory is released"):
        generate(runner, PROMPTS[0])
    execute(runner, ResumeMemory(("kv_cache",)))
    assert tokens_of(runner) == old_tokens


def test_released_weights_can_be_replaced_and_come_back_from_where_they_came_last(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    execute(runner, ReleaseMemory(("kv_cache", "weights")))
    with failing_reads(after=5):
        assert refusal(runner, ReplaceWeights(str(new), "auto")).endswith("the disk is gone")
        assert "the disk is gone" in refusal(runner, ResumeMemory(("kv_cache", "weights")))
    assert runner.internal_state()["memory_usage"]["weight_gb"] == 0
    replace(runner, new)
    execute(runner, ResumeMemory(("kv_cache",)))
    assert tokens_of(runner) == new_tokens
    execute(runner, ReleaseMemory(("weights",)))
    execute(runner, ResumeMemory(("weights",)))
    assert tokens_of(runner) == new_tokens
    replace(runner, old)
    assert tokens_of(runner) == old_tokens


def test_quantized_weights(
    build: Callable[..., ModelRunner], old: Path, new: Path, tmp_path: Path, on_accelerator: None
) -> None:
    expected = tokens_of(build(new, quantization="int8wo"))
    runner = build(old, quantization="int8wo")
    assert tokens_of(runner) != expected
    replace(runner, new)
    assert tokens_of(runner) == expected
    replace(runner, old)
    replace(runner, convert(new, tmp_path / "converted", progress=False))
    assert tokens_of(runner) == expected


def test_a_window_that_no_sequence_outgrows_makes_no_other_model(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral", tmp_path)
    config = ModelConfig.from_pretrained(folder)
    assert config.windows == (8,) * config.num_layers
    loader_of(config.for_context(8), make_mesh(1), context_len=8).check(str(folder), "auto")
    loader_of(config, make_mesh(1)).check(str(folder), "auto")


def test_factors_of_rope_that_the_context_decides_make_no_other_model(tmp_path: Path) -> None:
    folder = make_checkpoint("phi3-within", tmp_path)
    config = ModelConfig.from_pretrained(folder)
    loader_of(config.for_context(256), make_mesh(1), context_len=256).check(str(folder), "auto")


def test_options_of_the_server_make_no_other_model(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    config = ModelConfig.from_pretrained(folder)
    loader_of(config.replace(attn_dp_size=2, quantization="int8wo"), make_mesh(2, attn_dp_size=2)).check(str(folder), "auto")


@pytest.mark.parametrize("quantization", [None, "int8wo"])
@pytest.mark.parametrize("load_format", ["safetensors", "orbax", "dummy"])
def test_loading_again_compiles_nothing(
    old: Path, new: Path, tmp_path: Path, load_format: str, quantization: str | None
) -> None:
    """On two devices, where columns are rearranged."""
    config = ModelConfig.from_pretrained(old).replace(quantization=quantization)
    folders = [old, new]
    if load_format == "orbax":
        folders = [convert(folder, tmp_path / folder.name, progress=False) for folder in folders]
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), ("data", TENSOR_AXIS))
    loader = loader_of(config, mesh)
    first = loader.load(str(folders[0]), load_format)
    counter = CompileCounter()
    counter.mark_ready()
    second = loader.load(str(folders[1]), load_format)
    assert counter.after_ready == 0
    assert jax.tree.map(_kind, first) == jax.tree.map(_kind, second)


def _kind(array: jax.Array) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.sharding


@contextlib.contextmanager
def failing_reads(after: int) -> Iterator[None]:
    """The disk goes away when so many slices of tensors were read."""
    remaining = iter(range(after))
    read = SafetensorsCheckpoint.read

    def failing(checkpoint: SafetensorsCheckpoint, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if next(remaining, None) is None:
            raise OSError("the disk is gone")
        return read(checkpoint, name, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsCheckpoint, "read", failing)
        yield
