"""Heads of classifiers, rerankers and reward models, and matrices behind a pooling: as read, and computed as torch does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_model import mesh_of
from jax.sharding import PartitionSpec
from pooled_models import DECODER, ENCODER, HIDDEN, LABELS, read, save_model, save_modules, write, write_modules

from jaxserve.models import CheckpointError, abstract_params, build_decoder, convert, load_params
from jaxserve.models.specs import DenseSpec, NormSpec, PoolingSpec


def head_of(folder: Path, vectors: np.ndarray, tp_size: int = 1, dtype: Any = jnp.float32, **loading: Any) -> np.ndarray:
    """What the model in a folder makes of pooled vectors."""
    config, mesh = read(folder).replace(**loading.pop("changes", {})), mesh_of(tp_size)
    params = load_params(folder, config, mesh, dtype, progress=False, **loading)
    decoder = build_decoder(config, tp_size)
    specs = jax.tree.map(lambda info: info.spec, abstract_params(config, dtype, tp_size))
    whole = PartitionSpec()
    program = jax.shard_map(decoder.pool_head, mesh=mesh, in_specs=(specs, whole), out_specs=whole, check_vma=False)
    found = jax.jit(program)(params, vectors)
    assert found.shape == (len(vectors), config.pooled_size) and found.dtype == jnp.float32
    return np.asarray(found)


def vectors_of(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(5, size)).astype(np.float32)


SCORES: dict[str, Any] = {"labels": ("LABEL_0", "LABEL_1", "LABEL_2"), "activation": "softmax"}
SQUARE: dict[str, Any] = {"size_in": HIDDEN, "size_out": HIDDEN}
TO_LABELS: dict[str, Any] = {"size_in": HIDDEN, "size_out": LABELS}
CLASSIFIER = DenseSpec(name="classifier", **TO_LABELS)


def scores(kind: str, *layers: DenseSpec) -> PoolingSpec:
    return PoolingSpec(kinds=(kind,), layers=layers, gives="token_scores" if kind == "tokens" else "scores", **SCORES)


def modern_head(*, bias: bool) -> DenseSpec:
    norm = NormSpec(eps=1e-5, subtracts_mean=True, bias=bias)
    return DenseSpec(name="head.dense", **SQUARE, bias=bias, act="gelu", norm=norm, norm_name="head.norm")


def tanh(module: Any) -> Callable[[Any], Any]:
    return lambda x: module(x).tanh()


MODERN = {"classifier_pooling": "mean", "pad_token_id": 0, "reference_compile": False, "local_attention": 8}
# Class of Transformers, keys of its config, what is read of it, its own head as functions.
HEADS: list[tuple[str, dict[str, Any], PoolingSpec, Callable[[Any], Sequence[Callable[[Any], Any]]]]] = [
    (
        "BertForSequenceClassification", ENCODER,
        scores("cls", DenseSpec(name="bert.pooler.dense", **SQUARE, act="tanh"), CLASSIFIER),
        lambda model: (tanh(model.bert.pooler.dense), model.classifier),
    ),
    ("BertForTokenClassification", ENCODER, scores("tokens", CLASSIFIER), lambda model: (model.classifier,)),
    (
        "XLMRobertaForSequenceClassification", {**ENCODER, "pad_token_id": 1},
        scores(
            "cls", DenseSpec(name="classifier.dense", **SQUARE, act="tanh"), DenseSpec(name="classifier.out_proj", **TO_LABELS)
        ),
        lambda model: (tanh(model.classifier.dense), model.classifier.out_proj),
    ),
    (
        "RobertaForTokenClassification", {**ENCODER, "pad_token_id": 1}, scores("tokens", CLASSIFIER),
        lambda model: (model.classifier,),
    ),
    (
        "DistilBertForSequenceClassification",
        {"vocab_size": 320, "dim": HIDDEN, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        scores("cls", DenseSpec(name="pre_classifier", **SQUARE, act="relu"), CLASSIFIER),
        lambda model: (model.pre_classifier, lambda x: x.relu(), model.classifier),
    ),
    (
        "NomicBertForSequenceClassification", ENCODER,
        scores("cls", DenseSpec(name="nomic_bert.pooler.dense", **SQUARE, act="tanh"), CLASSIFIER),
        lambda model: (tanh(model.nomic_bert.pooler.dense), model.classifier),
    ),
    (
        "ModernBertForSequenceClassification", {**ENCODER, **MODERN}, scores("mean", modern_head(bias=False), CLASSIFIER),
        lambda model: (model.head, model.classifier),
    ),
    (
        "ModernBertForTokenClassification", {**ENCODER, **MODERN, "norm_bias": True, "classifier_bias": True},
        scores("tokens", modern_head(bias=True), CLASSIFIER), lambda model: (model.head, model.classifier),
    ),
    (
        "Qwen3ForSequenceClassification", DECODER, scores("last", DenseSpec(name="score", **TO_LABELS, bias=False)),
        lambda model: (model.score,),
    ),
    (
        "Qwen3ForTokenClassification", DECODER, scores("tokens", DenseSpec(name="score", **TO_LABELS)),
        lambda model: (model.score,),
    ),
    (
        "Gemma3TextForSequenceClassification", {**DECODER, "layer_types": ["full_attention"] * 2},
        scores("last", DenseSpec(name="score", **TO_LABELS, bias=False)), lambda model: (model.score,),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model_class", "kwargs", "spec", "head"), HEADS, ids=[row[0] for row in HEADS])
def test_heads_of_transformers(
    model_class: str, kwargs: dict[str, Any], spec: PoolingSpec, head: Callable[[Any], Sequence[Any]], tmp_path: Path
) -> None:
    import torch

    model = save_model(tmp_path, model_class, **kwargs, num_labels=LABELS)
    config = read(tmp_path)
    assert config.pooling == spec and not config.generates
    vectors = vectors_of(config.pooling.layers[0].size_in)
    with torch.no_grad():
        expected = torch.tensor(vectors)
        for function in head(model):
            expected = function(expected)
    for tp_size in (1, 2):
        np.testing.assert_allclose(head_of(tmp_path, vectors, tp_size), expected.numpy(), atol=1e-6, rtol=1e-6)


def test_modules_behind_the_pooling_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    import torch

    def behind(modules: Any) -> list[Any]:
        dense = [modules.Dense(2 * HIDDEN, 48), modules.LayerNorm(48)]
        acts = (torch.nn.Identity(), torch.nn.Sigmoid(), torch.nn.ReLU(), torch.nn.GELU(), torch.nn.SiLU())
        return [
            modules.Pooling(HIDDEN, ("cls", "max")),
            *dense,
            *(modules.Dense(48, 48, activation_function=act) for act in acts),
        ]

    made = save_modules(tmp_path, behind)
    vectors = vectors_of(2 * HIDDEN)
    with torch.no_grad():
        features = {"sentence_embedding": torch.tensor(vectors)}
        for module in made[1:]:
            features = module(features)
    expected = features["sentence_embedding"].numpy()
    for tp_size in (1, 2):
        np.testing.assert_allclose(head_of(tmp_path, vectors, tp_size), expected, atol=1e-6, rtol=1e-6)
    # Whatever becomes of the model's own matrices.
    np.testing.assert_allclose(head_of(tmp_path, vectors, dtype=jnp.bfloat16), expected, atol=1e-6, rtol=1e-6)
    quantized = head_of(tmp_path, vectors, changes={"quantization": "int8wo"})
    np.testing.assert_allclose(quantized, expected, atol=1e-6, rtol=1e-6)
    converted = convert(tmp_path, tmp_path / "converted", progress=False)
    np.testing.assert_allclose(head_of(converted, vectors, tp_size=2), expected, atol=1e-6, rtol=1e-6)


def test_a_reward_model_of_two_matrices(tmp_path: Path) -> None:
    """Transformers has none: the backbone is Qwen2's, the head as the models' own code has it."""
    import torch
    from safetensors.torch import load_file, save_file

    save_model(tmp_path, "Qwen2ForSequenceClassification", **DECODER)
    head = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, {**raw, "architectures": ["Qwen2ForRewardModel"], "num_labels": 1})
    config, vectors = read(tmp_path), vectors_of(HIDDEN)
    assert config.pooling == PoolingSpec(
        kinds=("last",),
        layers=(DenseSpec(name="score.0", **SQUARE, act="relu"), DenseSpec(name="score.2", size_in=HIDDEN, size_out=1)),
        gives="scores",
        labels=("LABEL_0",),
        activation="none",
    )
    np.testing.assert_allclose(head_of(tmp_path, vectors), head(torch.tensor(vectors)).detach().numpy(), atol=1e-6, rtol=1e-6)


def test_a_reward_model_of_steps(tmp_path: Path) -> None:
    write(tmp_path, {**DECODER, "architectures": ["Qwen2ForProcessRewardModel"], "model_type": "qwen2"})
    pooling = read(tmp_path).pooling
    assert (pooling.kinds, pooling.gives, pooling.activation) == (("tokens",), "token_scores", "softmax")
    assert pooling.layers[-1].size_out == len(pooling.labels) == 2
    write(tmp_path, {**DECODER, "architectures": ["InternLM2ForRewardModel"], "model_type": "internlm2"})
    with pytest.raises(
        ValueError, match=r"config\.json: architecture 'InternLM2ForRewardModel' is not supported; reward models"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "bad", "0": "good"}}, ("good", "bad"), "softmax"),
        ({"id2label": {"0": "good"}}, ("good",), "sigmoid"),
        ({"id2label": {"0": "good"}, "num_labels": 2}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"problem_type": "regression", "num_labels": 1}, ("LABEL_0",), "none"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",), "none",
        ),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            ("LABEL_0",), "none",
        ),
    ],
)  # fmt: skip
def test_labels_and_what_becomes_of_their_scores(
    changes: dict[str, Any], labels: tuple[str, ...], activation: str, tmp_path: Path
) -> None:
    raw = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", **ENCODER, **changes}
    pooling = read(write(tmp_path, raw)).pooling
    assert (pooling.labels, pooling.activation, pooling.gives) == (labels, activation, "scores")
    assert pooling.layers[-1].size_out == len(labels)


def test_a_cross_encoder_as_it_is_written_now(tmp_path: Path) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    save_model(tmp_path / "model", "BertForSequenceClassification", **ENCODER, num_labels=1)
    theirs = CrossEncoder(str(tmp_path / "model"), activation_fn=torch.nn.Identity(), device="cpu", max_length=24)
    theirs.save_pretrained(str(tmp_path / "cross"), create_model_card=False)
    config = read(tmp_path / "cross")
    assert (config.pooling.gives, config.pooling.activation, config.context_len) == ("scores", "none", 24)
    theirs = CrossEncoder(str(tmp_path / "model"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "other"), create_model_card=False)
    assert read(tmp_path / "other").pooling.activation == "sigmoid"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label must name the labels 0 to 1, got 0, 2\."),
        ({"num_labels": 0}, r"num_labels must be a whole number of at least 1, got 0\."),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, r"Identity, Sigmoid, Softmax; got 'torch\.nn\.Tanh'\."),
        (
            {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "max"},
            "must be cls or mean, got 'max'",
        ),
    ],
)
def test_heads_that_are_not_supported(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    raw = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", **ENCODER, **changes}
    with pytest.raises(ValueError, match=sentence) as raised:
        read(write(tmp_path, raw))
    assert str(raised.value).startswith(str(tmp_path / "config.json"))


# --- weights


def test_random_weights(tmp_path: Path) -> None:
    encoder = write(tmp_path, {"architectures": ["BertModel"], "model_type": "bert", **ENCODER})
    write_modules(encoder, ("Pooling", {}), ("Dense", {"in_features": HIDDEN, "out_features": 200}))
    params = load_params(encoder, read(encoder), mesh_of(2), jnp.bfloat16, "dummy", progress=False)
    layer = params["pool_head"]["layers"][0]
    assert layer["weight"].matrix.dtype == jnp.float32 and layer["weight"].matrix.shape == (HIDDEN, 200)
    assert np.isclose(np.std(layer["weight"].matrix), HIDDEN**-0.5, rtol=0.05)
    assert layer["bias"].shape == (200,)
    alone = head_of(encoder, vectors_of(HIDDEN), load_format="dummy")
    np.testing.assert_allclose(head_of(encoder, vectors_of(HIDDEN), 2, load_format="dummy"), alone, atol=1e-6)
    assert (alone.std(axis=0) > 0).all()


def test_without_layers_vectors_stay(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3Model", **DECODER)
    vectors = vectors_of(HIDDEN)
    np.testing.assert_array_equal(head_of(tmp_path, vectors), vectors)


def test_a_module_whose_weights_are_missing(tmp_path: Path) -> None:
    save_modules(tmp_path, lambda modules: [modules.Pooling(HIDDEN), modules.Dense(HIDDEN, 8)])
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    sentence = r"tensor 2_Dense\.linear\.(weight|bias) is missing\. 2_Dense holds pytorch_model\.bin, which is not read; "
    with pytest.raises(CheckpointError, match=sentence):
        head_of(tmp_path, vectors_of(HIDDEN))
