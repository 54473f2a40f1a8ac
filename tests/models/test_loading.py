"""Loading safetensors: layouts, shards, types, and a sentence with file and tensor for everything that can be wrong."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import make_checkpoint
from dense_model import folder_logits, mesh_of, oracle_logits, prompt
from jax.sharding import NamedSharding
from model_families import CASES
from safetensors.numpy import load_file, save_file

from jaxserve.models import CheckpointError, ModelConfig, abstract_params, divide_layers, load_params, loading
from jaxserve.models.names import stored_arrays

CheckpointOf = Callable[[str], Path]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(checkpoint: CheckpointOf, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2-windows", tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")


def load(folder: Path, dtype: Any = jnp.float32, tp_size: int = 1, **options: Any) -> Any:
    options.setdefault("progress", False)
    return load_params(folder, ModelConfig.from_pretrained(folder), mesh_of(tp_size), dtype, **options)


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def fails(folder: Path, sentence: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load(folder, **options)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_arrays_are_as_described(name: str, tp_size: int, checkpoint: CheckpointOf) -> None:
    folder, mesh = checkpoint(name), mesh_of(tp_size)
    config = ModelConfig.from_pretrained(folder)
    if config.num_heads % tp_size:
        with pytest.raises(ValueError, match="--tp-size must divide the model's num_heads=4; got 8"):
            abstract_params(config, jnp.float32, tp_size)
        return
    params = load(folder, jnp.bfloat16, tp_size)
    infos = abstract_params(config, jnp.bfloat16, tp_size)
    shardings = jax.tree.map(lambda info: NamedSharding(mesh, info.spec), infos)
    assert jax.tree.structure(params) == jax.tree.structure(infos) == jax.tree.structure(shardings)
    jax.tree.map(lambda array, info: np.testing.assert_equal(array.shape, info.shape), params, infos)
    assert all(jax.tree.leaves(jax.tree.map(lambda array, sharding: array.sharding == sharding, params, shardings)))
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_columns_of_qkv_go_group_by_group(checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama")
    prefix, dim = "model.layers.0.self_attn", 16
    tensors = load_file(folder / "model.safetensors")
    q, k, v = (tensors[f"{prefix}.{part}_proj.weight"].reshape(-1, dim, 64) for part in "qkv")
    groups = [[q[0], q[1], k[0], v[0]], [q[2], q[3], k[1], v[1]]]
    qkv = load(folder)["layers"][0]["attn"]["qkv"].matrix
    np.testing.assert_array_equal(qkv, np.concatenate(list(itertools.chain(*groups))).T)
    halves = [[q[0], k[0], v[0]], [q[1], k[0], v[0]], [q[2], k[1], v[1]], [q[3], k[1], v[1]]]
    qkv = load(folder, tp_size=4)["layers"][0]["attn"]["qkv"].matrix
    np.testing.assert_array_equal(qkv, np.concatenate(list(itertools.chain(*halves))).T)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_columns_of_gate_and_up_go_shard_by_shard(tp_size: int, checkpoint: CheckpointOf) -> None:
    folder = checkpoint("llama-biases")
    tensors = load_file(folder / "model.safetensors")
    params = load(folder, tp_size=tp_size)
    for ours, theirs in (("gate_up", "weight"), ("gate_up_bias", "bias")):
        gate, up = (np.split(tensors[f"model.layers.1.mlp.{part}_proj.{theirs}"], tp_size) for part in ("gate", "up"))
        (array,) = jax.tree.leaves(params["layers"][1]["mlp"][ours])
        np.testing.assert_array_equal(array, np.concatenate(list(itertools.chain(*zip(gate, up, strict=True)))).T)
        for shard, columns in enumerate(sorted(array.addressable_shards, key=lambda held: held.device.id)):
            np.testing.assert_array_equal(columns.data, np.concatenate([gate[shard], up[shard]]).T)


@pytest.mark.parametrize("divided", ["columns", "layers"])
def test_a_host_reads_what_its_devices_hold(divided: str, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two: by the devices that each reaches of four, or by the stage that it has."""
    folder, mesh = checkpoint("llama"), mesh_of(4)
    config, read_block = ModelConfig.from_pretrained(folder), loading._read_block
    blocks: dict[tuple[Any, ...], int] = {}  # which of which array, and its bytes

    def noted(tensors: Any, info: Any, bounds: Any) -> np.ndarray:
        block = read_block(tensors, info, bounds)
        blocks[(info.source.names, bounds)] = block.nbytes
        return block

    def read(part: ModelConfig = config) -> dict[tuple[Any, ...], int]:
        blocks.clear()
        loading.read_safetensors(folder, stored_arrays(abstract_params(part, jnp.float32, 4)), mesh, lambda name, array: None)
        return dict(blocks)

    monkeypatch.setattr(loading, "_read_block", noted)
    everything = read()
    if divided == "layers":
        parts = [read(config.replace(stage=stage)) for stage in divide_layers(config.num_layers, 2)]
        assert not parts[0].keys() & parts[1].keys()
    else:
        reached, parts = NamedSharding.addressable_devices_indices_map, []
        monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, shards: shards)
        for host in range(2):
            monkeypatch.setattr(
                NamedSharding, "addressable_devices_indices_map",
                lambda self, shape, host=host: {
                    device: index for device, index in reached(self, shape).items() if device.id // 2 == host
                },
            )  # fmt: skip
            parts.append(read())
        kept_whole = {block for block in everything if sum(names == block[0] for names, _ in everything) == 1}
        assert parts[0].keys() & parts[1].keys() == kept_whole
    assert parts[0] | parts[1] == everything
    assert all(sum(part.values()) < 0.7 * sum(everything.values()) for part in parts)


def test_the_vocabulary_is_padded_with_zeros(checkpoint: CheckpointOf) -> None:
    params = load(checkpoint("mistral"), tp_size=4)
    assert params["embed"].shape == (504, 64)
    assert params["lm_head"].matrix.shape == (64, 504)
    assert not np.any(params["embed"][503:])
    assert not np.any(params["lm_head"].matrix[:, 503:])


def test_model_that_does_not_divide(checkpoint: CheckpointOf) -> None:
    config = ModelConfig.from_pretrained(checkpoint("llama"))
    layer = config.layers[0]
    six_heads = dataclasses.replace(layer.mixer, num_heads=6)
    odd = dataclasses.replace(layer.mlp, intermediate_size=97)
    with pytest.raises(ValueError, match="num_kv_heads=2 or be a multiple of it; got 3"):
        abstract_params(config.replace(layers=(dataclasses.replace(layer, mixer=six_heads),)), jnp.float32, 3)
    with pytest.raises(ValueError, match="intermediate_size=97; got 2"):
        abstract_params(config.replace(layers=(layer, dataclasses.replace(layer, mlp=odd))), jnp.float32, 2)


def test_sharded_checkpoint(sharded: Path) -> None:
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    ids = prompt(20, 500)
    np.testing.assert_allclose(folder_logits(sharded, ids, 2), oracle_logits(sharded, ids), atol=1e-4, rtol=0)
    (sharded / "model.safetensors.index.json").rename(sharded / "aside")
    load(sharded)  # the files name their tensors themselves
    (sharded / "aside").rename(sharded / "model.safetensors.index.json")


def test_bfloat16_file_to_float32(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, dtype="bfloat16")
    assert ModelConfig.from_pretrained(folder).dtype == "bfloat16"
    ids = prompt(20, 500)
    np.testing.assert_allclose(folder_logits(folder, ids, 2), oracle_logits(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("file_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_type_is_converted(file_dtype: Any, dtype: Any, folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({name: array.astype(file_dtype) for name, array in t.items()}))
    tensors = load_file(folder / "model.safetensors")
    params = load(folder, dtype)
    for name, array in (
        ("mlp.down_proj", params["layers"][0]["mlp"]["down"].matrix),
        ("self_attn.o_proj", params["layers"][0]["attn"]["o"].matrix),
    ):
        expected = tensors[f"model.layers.0.{name}.weight"].T.astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(array, np.float32), expected.astype(np.float32))


def test_rewriting_the_file_does_not_change_loaded_weights(folder: Path) -> None:
    params = load(folder)
    before = np.array(params["embed"])
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    np.testing.assert_array_equal(params["embed"], before)


def test_progress_goes_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_TERMINAL_COLUMNS", "80")  # as if that were a terminal
    load(folder, progress=True)
    shown = capsys.readouterr()
    assert "Loading weights:" in shown.err
    load(folder)
    assert capsys.readouterr() == ("", "")
    assert shown.out == ""


def test_no_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(folder, r"model holds no weights: expected model\.safetensors, .* It holds pytorch_model\.bin, which is not read")
    (folder / "pytorch_model.bin").unlink()
    fails(folder, r"model holds no weights: .* or an orbax folder\.$")
    config = ModelConfig.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        load_params(tmp_path / "nowhere", config, mesh_of(1), jnp.float32, progress=False)


def test_missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop(Q_PROJ))
    fails(folder, rf"model\.safetensors: tensor {Q_PROJ} is missing")


def test_wrong_shape(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({Q_PROJ: t[Q_PROJ][:-16]}))
    fails(folder, rf"model\.safetensors: tensor {Q_PROJ} has shape \[48, 64\], but config\.json asks for \[64, 64\]")


def test_type_that_cannot_be_read(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.int8)}))
    fails(folder, rf"tensor {Q_PROJ} has type I8; types that can be read: F64, F32, F16, BF16")


@pytest.mark.parametrize("kept", [0, 5, 200, -100])
def test_file_that_was_cut_off(kept: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    fails(folder, r"model\.safetensors \(\d+ bytes\) is cut off or not a safetensors file")


def test_file_of_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    fails(folder, r"model\.safetensors \(1000 bytes\) is cut off or not a safetensors file")


def test_index_without_its_files(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    file = weight_map.pop(Q_PROJ)
    index.write_text(json.dumps({"weight_map": weight_map}))
    fails(folder, rf"index\.json: tensor {Q_PROJ} is missing")

    other = next(name for name in weight_map.values() if name != file)
    index.write_text(json.dumps({"weight_map": {**weight_map, Q_PROJ: other}}))
    fails(folder, rf"{other}: tensor {Q_PROJ} is missing")

    index.write_text(json.dumps({"weight_map": {**weight_map, Q_PROJ: file}}))
    (folder / file).unlink()
    fails(folder, rf"{file} is missing; model\.safetensors\.index\.json says that it holds tensor \S+\.")

    index.write_text("{}")
    fails(folder, r"index\.json is not a valid index of safetensors files \(KeyError\('weight_map'\)\)")
    index.write_text('{"weight_map": []}')
    fails(folder, r"index\.json is not a valid index")


def test_unknown_format(folder: Path) -> None:
    with pytest.raises(ValueError, match="--load-format must be auto, safetensors, orbax or dummy; got 'gguf'"):
        load(folder, load_format="gguf")
    fails(folder, r"orbax does not exist; write it with `jaxserve convert`", load_format="orbax")


@pytest.mark.parametrize("name", ["llama-biases", "mistral", "qwen3-biases"])
def test_dummy_weights(name: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    shutil.copy(checkpoint(name) / "config.json", tmp_path)  # nothing else is needed
    ids = prompt(24, 500)
    logits = folder_logits(tmp_path, ids, load_format="dummy")
    assert len(set(logits.argmax(-1))) > 12, "tokens must differ"
    assert 0.3 < logits.std() < 3
    for tp_size in (2, 4):
        np.testing.assert_allclose(folder_logits(tmp_path, ids, tp_size, load_format="dummy"), logits, atol=1e-4)


def test_dummy_weights_follow_the_seed(checkpoint: CheckpointOf) -> None:
    first, again, other = (load(checkpoint("llama"), load_format="dummy", seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first["embed"], again["embed"])
    assert np.any(np.asarray(first["embed"]) != np.asarray(other["embed"]))
    down = [np.asarray(layer["mlp"]["down"].matrix) for layer in first["layers"].values()]
    assert np.any(down[0] != down[1])


def test_all_cases_have_room_for_the_tokenizer(checkpoint: CheckpointOf) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("llama"))
    text = "Hello, wörld! 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|begin|><|turn|>user\nHi<|end|>\n<|turn|>assistant\n"
    assert len(tokenizer) <= min(case.kwargs.get("vocab_size", 512) for case in CASES.values())
    assert ModelConfig.from_pretrained(checkpoint("llama")).eos_token_ids == (tokenizer.eos_token_id,)
