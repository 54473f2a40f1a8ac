"""The heads that config.json's architectures have behind the hidden states: classifiers, rerankers, reward models.

Decoders have one matrix, `score`, on the last token's state. Encoders differ: a few lines for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxserve.models.families import required_int
from jaxserve.models.families.architectures import split_architecture
from jaxserve.models.specs import Activation, DenseSpec, NormSpec, PoolingSpec

# Of config.json and the number of labels.
_TextHead: TypeAlias = "Callable[[Mapping[str, Any], int], _Head]"
_TokenHead: TypeAlias = "Callable[[Mapping[str, Any], int], tuple[DenseSpec, ...]]"

_OF_TEXTS, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
# Of families with a head of two matrices and ReLU between them.
_REWARDS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}  # -> labels if config.json does not say
_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}  # of torch.nn


@dataclasses.dataclass(frozen=True)
class _Head:
    """Its layers, and what they are of."""

    kinds: tuple[str, ...]
    layers: tuple[DenseSpec, ...]


def _score(raw: Mapping[str, Any], num_labels: int, *, bias: bool) -> tuple[DenseSpec, ...]:
    return (DenseSpec(name="score", size_in=required_int(raw, "hidden_size"), size_out=num_labels, bias=bias),)


def _decoder(raw: Mapping[str, Any], num_labels: int) -> _Head:
    return _Head(("last",), _score(raw, num_labels, bias=False))


def _decoder_tokens(raw: Mapping[str, Any], num_labels: int) -> tuple[DenseSpec, ...]:
    return _score(raw, num_labels, bias=bool(raw.get("token_classification_bias", True)))


def _two(raw: Mapping[str, Any], num_labels: int, names: tuple[str, str], act: str) -> tuple[DenseSpec, ...]:
    """A square matrix and the classifier's."""
    size = required_int(raw, "hidden_size")
    return (
        DenseSpec(name=names[0], size_in=size, size_out=size, act=act),
        DenseSpec(name=names[1], size_in=size, size_out=num_labels),
    )


def _pooler(prefix: str) -> _TextHead:
    """The classifier reads what the model itself makes of the first token."""
    names = (f"{prefix}.pooler.dense", "classifier")
    return lambda raw, num_labels: _Head(("cls",), _two(raw, num_labels, names, "tanh"))


def _roberta(raw: Mapping[str, Any], num_labels: int) -> _Head:
    return _Head(("cls",), _two(raw, num_labels, ("classifier.dense", "classifier.out_proj"), "tanh"))


def _distil_bert(raw: Mapping[str, Any], num_labels: int) -> _Head:
    return _Head(("cls",), _two(raw, num_labels, ("pre_classifier", "classifier"), "relu"))


def _modern_bert(raw: Mapping[str, Any], num_labels: int) -> _Head:
    pooling = raw.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ValueError(f"classifier_pooling must be cls or mean, got {pooling!r}.")
    return _Head((pooling,), _modern_bert_tokens(raw, num_labels))


def _modern_bert_tokens(raw: Mapping[str, Any], num_labels: int) -> tuple[DenseSpec, ...]:
    dense, classifier = _two(raw, num_labels, ("head.dense", "classifier"), str(raw.get("classifier_activation", "gelu")))
    norm = NormSpec(eps=float(raw.get("norm_eps", 1e-5)), subtracts_mean=True, bias=bool(raw.get("norm_bias", False)))
    bias = bool(raw.get("classifier_bias", False))
    return dataclasses.replace(dense, bias=bias, norm=norm, norm_name="head.norm"), classifier


def _classifier(raw: Mapping[str, Any], num_labels: int) -> tuple[DenseSpec, ...]:
    return (DenseSpec(name="classifier", size_in=required_int(raw, "hidden_size"), size_out=num_labels),)


# By the family's name, of those that are not like decoders'.
_TEXT_HEADS: dict[str, _TextHead] = {
    "Bert": _pooler("bert"),
    "NomicBert": _pooler("nomic_bert"),
    "Roberta": _roberta,
    "XLMRoberta": _roberta,
    "Camembert": _roberta,
    "DistilBert": _distil_bert,
    "ModernBert": _modern_bert,
}
_TOKEN_HEADS: dict[str, _TokenHead] = {
    **dict.fromkeys(("Bert", "NomicBert", "Roberta", "XLMRoberta", "Camembert", "DistilBert"), _classifier),
    "ModernBert": _modern_bert_tokens,
}


def read_head(raw: Mapping[str, Any], architecture: str, activation: str | None = None) -> PoolingSpec | None:
    """Of config.json; None if this architecture has none. `activation`: torch's name of what another file says of its scores.
    ValueError for a head that is not supported."""
    family, ending = split_architecture(architecture)
    if ending in ("ForRewardModel", "ForProcessRewardModel"):
        return _reward(raw, architecture)
    if ending not in (_OF_TEXTS, _OF_TOKENS):
        return None
    labels = _labels(raw)
    chosen = _activation(raw, len(labels), activation)
    if ending == _OF_TOKENS:
        layers = _TOKEN_HEADS.get(family, _decoder_tokens)(raw, len(labels))
        return PoolingSpec(kinds=("tokens",), layers=layers, gives="token_scores", labels=labels, activation=chosen)
    head = _TEXT_HEADS.get(family, _decoder)(raw, len(labels))
    return PoolingSpec(kinds=head.kinds, layers=head.layers, gives="scores", labels=labels, activation=chosen)


def _reward(raw: Mapping[str, Any], architecture: str) -> PoolingSpec:
    if architecture not in _REWARDS:
        raise ValueError(
            f"architecture {architecture!r} is not supported; reward models are {', '.join(_REWARDS)}, "
            f"and any decoder's {_OF_TEXTS}."
        )
    size, labels = required_int(raw, "hidden_size"), _labels(raw, _REWARDS[architecture])
    layers = (
        DenseSpec(name="score.0", size_in=size, size_out=size, act="relu"),
        DenseSpec(name="score.2", size_in=size, size_out=len(labels)),
    )
    if architecture == "Qwen2ForRewardModel":
        return PoolingSpec(kinds=("last",), layers=layers, gives="scores", labels=labels)
    # Each step of a solution is right or wrong, with a probability.
    activation: Activation = "softmax" if len(labels) > 1 else "none"
    return PoolingSpec(kinds=("tokens",), layers=layers, gives="token_scores", labels=labels, activation=activation)


def _labels(raw: Mapping[str, Any], default: int = 2) -> tuple[str, ...]:
    """As Transformers: names by number where they are as many as num_labels, if that is given."""
    names, count = raw.get("id2label") or {}, raw.get("num_labels")
    count = len(names) or default if count is None else required_int(raw, "num_labels")
    if len(names) != count:
        return tuple(f"LABEL_{index}" for index in range(count))
    by_number = {int(index): str(name) for index, name in names.items()}
    if sorted(by_number) != list(range(count)):
        raise ValueError(f"id2label must name the labels 0 to {count - 1}, got {', '.join(map(str, sorted(by_number)))}.")
    return tuple(by_number[index] for index in range(count))


def _activation(raw: Mapping[str, Any], num_labels: int, other_file: str | None) -> Activation:
    """sentence-transformers' word, or what the training calls for."""
    named = other_file or (raw.get("sentence_transformers") or {}).get("activation_fn")
    named = named or raw.get("sbert_ce_default_activation_function")
    if named is not None:
        last = str(named).rpartition(".")[2]
        if not str(named).startswith("torch.nn.") or last not in _ACTIVATIONS:
            raise ValueError(f"the activation of scores must be torch.nn's {', '.join(_ACTIVATIONS)}; got {named!r}.")
        return _ACTIVATIONS[last]
    problem = raw.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"
