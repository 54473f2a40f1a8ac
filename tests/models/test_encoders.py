"""Encoders against Transformers: hidden states of several texts in one batch, on one device and sharded over several."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import load_model
from cpp_compiler import needs_compiler
from dense_model import folder_logits, mesh_of, oracle_logits, prompt
from jax.sharding import Mesh, PartitionSpec
from model_families import ENCODERS
from safetensors.numpy import load_file, save_file

from jaxserve.kernels.rotary import split_and_rotate
from jaxserve.models import (
    GatherAll,
    ModelConfig,
    OfAllShards,
    SelfAttentionSpec,
    abstract_params,
    build_decoder,
    convert,
    families,
    load_params,
)
from jaxserve.models.blocks.attend import HeadInputs, Inputs, Mixer
from jaxserve.models.families import find_family

ATOL = 1e-4
LENGTHS = (1, 33, 5, 48, 2)
FIRST_ID = 5  # of tests' texts: ids below are special, and RoBERTa counts no position for padding

CheckpointOf = Callable[[str], Path]


def texts_for(config: ModelConfig, lengths: Sequence[int] = LENGTHS) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and types of each text's tokens: two halves, of the first type and of the last."""
    rng, last = np.random.default_rng(0), max(config.embedding.token_types, 1) - 1
    return [
        (rng.integers(FIRST_ID, config.vocab_size, length), np.where(np.arange(length) < (length + 1) // 2, 0, last))
        for length in lengths
    ]


def attend_among(text_of: np.ndarray) -> Any:
    """Tokens of the same text, see each other, within the window on both sides; kv counts the layers."""

    def attend(inputs: Inputs, kv: Any, layer: Mixer, index: jax.Array) -> tuple[jax.Array, Any]:
        assert isinstance(inputs, HeadInputs) and isinstance(layer, SelfAttentionSpec) and not layer.is_causal
        q, k, v = split_and_rotate(inputs.qkv, inputs.rotary)
        scores = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=jnp.float32) * layer.scale
        slot = np.arange(len(text_of))
        visible = text_of[:, None] == text_of
        if layer.window is not None:
            visible &= abs(slot[:, None] - slot) < layer.window
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("hts,shd->thd", weights, v), kv + 1

    return attend


def hidden_states(
    folder: Path, texts: Sequence[tuple[np.ndarray, np.ndarray]], tp_size: int = 1, dtype: Any = jnp.float32, **changes: Any
) -> list[np.ndarray]:
    """Of all texts in one batch, one behind the other."""
    config = ModelConfig.from_pretrained(folder).replace(**changes)
    params = load_params(folder, config, mesh_of(tp_size), dtype, progress=False)
    decoder, lengths = build_decoder(config, tp_size), [len(ids) for ids, _ in texts]
    ids = np.concatenate([ids + types * config.vocab_size for ids, types in texts]).astype(np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    attend = attend_among(np.repeat(np.arange(len(lengths)), lengths))

    def run(params: Any, ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        context = decoder.context(positions)
        out = decoder.forward(params, decoder.embed(params, ids, context), context, jnp.int32(0), attend)
        return out.hidden, out.kv

    specs = jax.tree.map(lambda info: info.spec, abstract_params(config, dtype, tp_size)), PartitionSpec(), PartitionSpec()
    program = jax.shard_map(run, mesh=mesh_of(tp_size), in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    hidden, layers_seen = jax.jit(program)(params, ids, positions)
    assert layers_seen == config.num_layers
    return np.split(np.asarray(hidden, np.float32), np.cumsum(lengths)[:-1])


def oracle_states(folder: Path, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """What Transformers answers, of each text by itself."""
    import torch

    model = load_model(folder)
    takes_types = getattr(model.config, "type_vocab_size", 0) > 1

    def states(ids: np.ndarray, types: np.ndarray) -> np.ndarray:
        of_types = {"token_type_ids": torch.tensor(types[None])} if takes_types else {}
        found: np.ndarray = model(torch.tensor(ids[None]), **of_types).last_hidden_state[0].numpy()
        return found

    with torch.no_grad():
        return [states(ids, types) for ids, types in texts]


def assert_close(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], atol: float = ATOL) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert theirs.std() > 0.3, "the checkpoint's states are too flat to compare"
        np.testing.assert_allclose(own, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_equal_those_of_transformers(name: str, tp_size: int, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    config = ModelConfig.from_pretrained(folder)
    texts = texts_for(config, (*LENGTHS, config.context_len))
    assert not config.is_causal and not config.generates
    assert_close(hidden_states(folder, texts, tp_size), oracle_states(folder, texts))


@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic-bert"])
def test_bfloat16_is_near_float32(name: str, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    texts = texts_for(ModelConfig.from_pretrained(folder))
    found, expected = hidden_states(folder, texts, dtype=jnp.bfloat16), oracle_states(folder, texts)
    assert np.abs(np.concatenate(found) - np.concatenate(expected)).mean() < 0.05 * np.concatenate(expected).std()


@pytest.mark.parametrize("name", ["bert", "modernbert-older", "nomic-bert"])
def test_int8_weights_are_near_those_of_the_checkpoint(name: str, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    texts = texts_for(ModelConfig.from_pretrained(folder))
    found, expected = hidden_states(folder, texts, 2, quantization="int8wo"), oracle_states(folder, texts)
    error = np.abs(np.concatenate(found) - np.concatenate(expected)).mean()
    assert 0 < error < 0.03 * np.concatenate(expected).std()


@needs_compiler
@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic-bert"])
def test_native_products(name: str, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    texts = texts_for(ModelConfig.from_pretrained(folder), (3, 4))
    assert_close(hidden_states(folder, texts, native_products=True), oracle_states(folder, texts))


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
def test_embedded_tokens_where_attention_is_divided_by_tokens(name: str, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    config = ModelConfig.from_pretrained(folder)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.num_token_ids, (2, 6)).astype(np.int32)
    positions = rng.integers(0, config.context_len, (2, 6)).astype(np.int32)

    def embedded(num_shards: int) -> np.ndarray:
        shape, spec = config.replace(attn_dp_size=num_shards), PartitionSpec("data")
        mesh = Mesh(np.asarray(jax.devices()[:num_shards]).reshape(num_shards, 1), ("data", "tensor"))
        decoder, described = build_decoder(shape, num_shards), abstract_params(shape, jnp.float32, num_shards)

        def run(params: Any, own: jax.Array) -> jax.Array:
            of_all = OfAllShards(GatherAll(), jnp.asarray(positions).reshape(-1), None)
            context = decoder.context(own.reshape(-1), of_all=of_all)
            return decoder.embed(params, jnp.asarray(ids).reshape(-1), context)

        specs = jax.tree.map(lambda info: info.spec, described), spec
        program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False))
        return np.asarray(program(load_params(folder, shape, mesh, jnp.float32, progress=False), positions))

    np.testing.assert_allclose(embedded(2), embedded(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("older", "newer"), [("modernbert-older", "modernbert"), ("nomic-bert-older", "nomic-bert")])
def test_both_forms_of_config_json_say_the_same(older: str, newer: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = checkpoint(older)
    config = ModelConfig.from_pretrained(folder)
    assert config == ModelConfig.from_pretrained(folder / "oracle")
    if newer == "modernbert":
        assert config.windows == (None, 5, 5, None, 5)
        assert [mixer.rope.theta for mixer in config.attention] == [5000.0, 100.0, 100.0, 5000.0, 100.0]
    else:
        assert {mixer.rope.theta for mixer in config.attention} == {1000.0}


@pytest.mark.parametrize(
    ("name", "context_len", "num_token_ids"),
    [("bert", 128, 1006), ("roberta", 126, 512), ("camembert", 123, 512), ("distilbert", 128, 512), ("nomic-bert", 128, 1024)],
)
def test_how_long_texts_may_be(name: str, context_len: int, num_token_ids: int, checkpoint: CheckpointOf) -> None:
    config = ModelConfig.from_pretrained(checkpoint(name))
    assert (config.context_len, config.num_token_ids) == (context_len, num_token_ids)


def test_a_decoder_that_was_saved_without_its_head(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    """Its tensors' names do not begin with `model.`."""
    folder, ids = checkpoint("llama"), prompt(12, 300)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    np.testing.assert_allclose(folder_logits(tmp_path, ids), oracle_logits(folder, ids), atol=ATOL, rtol=0)


@pytest.mark.parametrize(("name", "prefix"), [("roberta", "roberta"), ("distilbert", "distilbert"), ("modernbert", "model")])
def test_an_encoder_that_was_saved_with_a_head(name: str, prefix: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    """Its tensors' names begin with the model's."""
    folder = checkpoint(name)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"{prefix}.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = ModelConfig.from_pretrained(folder)
    plain, prefixed = (load_params(path, config, mesh_of(1), jnp.float32, progress=False) for path in (folder, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, prefixed, plain)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_converted_checkpoint(tp_size: int, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = checkpoint("bert")
    config = ModelConfig.from_pretrained(folder)
    converted = convert(folder, tmp_path / "converted", progress=False)
    plain, restored = (load_params(path, config, mesh_of(tp_size), jnp.float32, progress=False) for path in (folder, converted))
    jax.tree.map(np.testing.assert_array_equal, restored, plain)


def test_every_encoder_is_tested(checkpoint: CheckpointOf) -> None:
    tested = {find_family(json.loads((checkpoint(name) / "config.json").read_text())).architecture for name in ENCODERS}
    assert tested == {family.architecture for family in families() if family.read.__module__.endswith("bert")}


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"position_embedding_type": "relative_key"}, r"must be 'absolute', got 'relative_key': relative positions"),
    ("bert", {"is_decoder": True}, r"is_decoder must be false: of this model family only encoders are supported\."),
    ("bert", {"add_cross_attention": True}, r"add_cross_attention must be false"),
    ("bert", {"hidden_act": "quick_gelu"}, r"hidden_act must be one of silu, .*; got 'quick_gelu'\."),
    ("bert", {"type_vocab_size": 0}, r"type_vocab_size must be a whole number of at least 1, got 0\."),
    ("roberta", {"pad_token_id": None}, r"pad_token_id must be a whole number of at least 0, .*; got None\."),
    ("roberta", {"max_position_embeddings": 2}, r"max_position_embeddings must be above the 2 rows .*, got 2\."),
    ("modernbert", {"local_attention": 0}, r"local_attention must be a whole number of at least 1, got 0\."),
    ("nomic-bert-older", {"activation_function": "gelu"}, r"activation_function must be one of swiglu, .*; got 'gelu'\."),
    ("nomic-bert-older", {"moe_every_n_layers": 2}, r"moe_every_n_layers must be 0 for this model family, got 2\."),
    ("nomic-bert-older", {"rotary_scaling_factor": 2}, r"rotary_scaling_factor must be null for this model family, got 2\."),
    ("nomic-bert-older", {"causal": True}, r"causal must be false"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "sentence"), REFUSALS, ids=[f"{row[0]}-{'-'.join(row[1])}" for row in REFUSALS])
def test_what_is_not_supported_is_said(
    case: str, changes: dict[str, Any], sentence: str, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    raw = {**json.loads((checkpoint(case) / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_pretrained(tmp_path)
