"""The files of sentence-transformers: modules.json lists modules, each with a folder of its own; the first is the model itself.

What is read is what its version 6 reads, older files too: https://github.com/huggingface/sentence-transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.models.families import required_int
from jaxserve.models.json_files import errors_of, read_json, read_json_value
from jaxserve.models.specs import DenseSpec, NormSpec, PoolingSpec

_LIST = "modules.json"
_TEXT = "sentence_embedding"  # a text's vector, among what modules pass on
# Words of ours for theirs.
_KINDS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# The same in older files, in the order in which the vectors of several are joined.
_OLD_KINDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_ACTS = {"Identity": None, "Tanh": "tanh", "Sigmoid": "sigmoid", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}  # of torch.nn
_WITH_CONFIG = ("Pooling", "Dense")  # whose config.json must be there
_LAYER_NORM = NormSpec(eps=1e-5, subtracts_mean=True, bias=True)  # torch's


@dataclasses.dataclass(frozen=True)
class Modules:
    """What they say; nothing if there are none."""

    are_there: bool = False
    pooling: PoolingSpec | None = None  # None: no module pools
    scores_words: bool = False  # a LogitScore module: a score is how likely the model answers with a word
    activation: str | None = None  # of a cross encoder's scores; torch's name
    max_len: int | None = None  # tokens of a text


@dataclasses.dataclass(frozen=True)
class _Module:
    kind: str  # the name of its class
    name: str  # of its folder
    file: Path  # its config.json
    config: Mapping[str, Any]


def read_modules(folder: Path, hidden_size: int) -> Modules:
    """Of the model in `folder`. ValueError names the file."""
    if not (folder / _LIST).is_file():
        return Modules()
    settings = read_json(folder / "config_sentence_transformers.json", required=False)
    with errors_of(folder / _LIST):
        first, *others = _listed(folder)
        if first.kind != "Transformer" or first.name:
            found = f"{first.kind} in {first.name!r}" if first.name else first.kind
            raise ValueError(f"the first module must be a Transformer in the model's folder itself, got {found}.")
    scores_words = any(module.kind == "LogitScore" for module in others)
    return Modules(
        are_there=True,
        pooling=None if scores_words else _pooling(folder / _LIST, others, hidden_size),
        scores_words=scores_words,
        activation=settings.get("activation_fn"),
        max_len=_max_len(folder),
    )


def _listed(folder: Path) -> list[_Module]:
    listed = read_json_value(folder / _LIST)
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, Mapping) for entry in listed):
        raise ValueError("a list of JSON objects is expected, one for each module.")
    modules = []
    for entry in listed:
        kind, path = str(entry.get("type")), str(entry.get("path") or "")
        if not kind.startswith("sentence_transformers."):
            raise ValueError(f"the module {kind!r} is not one of sentence-transformers and is not supported.")
        if path and (Path(path).name != path or path == ".."):
            raise ValueError(f"path must be the name of a folder in the model's, got {path!r}.")
        name, file = kind.rpartition(".")[2], folder / path / "config.json"
        config = read_json(file, required=name in _WITH_CONFIG) if path else {}
        modules.append(_Module(name, path, file, config))
    return modules


def _pooling(file: Path, modules: list[_Module], hidden_size: int) -> PoolingSpec | None:
    """Of the modules behind the model, which `file` lists; None if there are none."""
    modules = [module for module in modules if module.kind != "Dropout"]  # for training
    if not modules:
        return None
    first, *others = modules
    normalizes = bool(others) and others[-1].kind == "Normalize"
    with errors_of(file):
        _check_order([module.kind for module in (others[:-1] if normalizes else others)], first.kind)
    with errors_of(first.file):
        kinds = _kinds(first.config, hidden_size)
    layers: list[DenseSpec] = []
    size = len(kinds) * hidden_size
    for module in others:
        with errors_of(module.file):
            _check_names(module.config)
            if module.kind == "Dense":
                layers.append(_dense(module, size))
                size = layers[-1].size_out
            elif module.kind == "LayerNorm":
                layers[-1] = dataclasses.replace(layers[-1], norm=_LAYER_NORM, norm_name=f"{module.name}.norm")
    return PoolingSpec(kinds=kinds, layers=tuple(layers), normalizes=normalizes)


def _check_order(kinds: list[str], first: str) -> None:
    """Of the modules between the first and a Normalize at the end."""
    if first != "Pooling":
        raise ValueError(f"the module {first} is not supported behind a Transformer; Pooling is.")
    for before, kind in zip([first, *kinds], kinds, strict=False):
        if kind == "Normalize":
            raise ValueError("a Normalize module must be the last one.")
        if kind not in ("Dense", "LayerNorm"):
            raise ValueError(f"the module {kind} is not supported; Dense, LayerNorm and Normalize are.")
        if kind == "LayerNorm" and before != "Dense":
            raise ValueError(f"a LayerNorm module must stand behind a Dense module, got it behind {before}.")


def _kinds(config: Mapping[str, Any], hidden_size: int) -> tuple[str, ...]:
    if config.get("include_prompt") is False:
        raise ValueError("include_prompt must be true: all tokens of a text are pooled, those of its prompt, too.")
    size = config.get("embedding_dimension", config.get("word_embedding_dimension", hidden_size))
    if size != hidden_size:
        raise ValueError(f"embedding_dimension must be the model's hidden_size={hidden_size}, got {size!r}.")
    named = config.get("pooling_mode")
    if named is None:
        return tuple(kind for key, kind in _OLD_KINDS.items() if config.get(key)) or ("mean",)
    names = [named] if isinstance(named, str) else list(named)
    if not names or not all(name in _KINDS for name in names):
        raise ValueError(f"pooling_mode must be one or several of {', '.join(_KINDS)}; got {named!r}.")
    return tuple(_KINDS[name] for name in names)


def _dense(module: _Module, size_in: int) -> DenseSpec:
    config = module.config
    if config.get("use_residual"):
        raise ValueError("use_residual must be false: what goes in is not added to what comes out here.")
    if config.get("in_features") != size_in:
        raise ValueError(f"in_features must be {size_in}, the size of what comes in; got {config.get('in_features')!r}.")
    act = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if not act.startswith("torch.nn.") or act.rpartition(".")[2] not in _ACTS:
        raise ValueError(f"activation_function must be torch.nn's {', '.join(_ACTS)}; got {act!r}.")
    return DenseSpec(
        name=f"{module.name}.linear",
        size_in=size_in,
        size_out=required_int(config, "out_features"),
        bias=bool(config.get("bias", True)),
        act=_ACTS[act.rpartition(".")[2]],
    )


def _check_names(config: Mapping[str, Any]) -> None:
    for key in ("module_input_name", "module_output_name"):
        if (name := config.get(key)) not in (None, _TEXT):
            raise ValueError(f"{key} must be {_TEXT!r}, got {name!r}.")


def _max_len(folder: Path) -> int | None:
    """Of sentence_bert_config.json, which older versions named after other models, too. Newer ones leave it to the tokenizer,
    whose number may be a huge one."""
    places = [(file, "max_seq_length") for file in sorted(folder.glob("sentence_*_config.json"))]
    for file, key in (*places, (folder / "tokenizer_config.json", "model_max_length")):
        found = read_json(file, required=False).get(key)
        if found is None:
            continue
        if not isinstance(found, int | float) or isinstance(found, bool) or found < 1:
            raise ValueError(f"{file}: {key} must be at least 1 token, got {found!r}.")
        return int(found)
    return None
