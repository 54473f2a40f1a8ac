"""Reads a LoRA adapter as PEFT stores it: a folder with adapter_config.json and adapter_model.safetensors.

Knows PEFT's files and names; not the model that the adapter is for, nor JAX. What counts is the tensors that are there: the
config only says by how much their product is scaled, and whether the adapter needs anything but LoRA, which is refused, since
without it the answers would be wrong and nobody would notice. Semantics are those of PEFT 0.21.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"
_READABLE_TYPES = ("F64", "F32", "F16", "BF16")
_SHOWN_LEN = 200  # characters of a config's value in a message

# LoraConfig's defaults, for what a config leaves out.
_DEFAULT_RANK = 8
_DEFAULT_ALPHA = 8

# Fields that change what an adapter computes, or which weights it changes, when they are set; and what they ask for.
# Others only say how the training began or went, or which modules it chose.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "Monte Carlo LoRA",
    "arrow_config": "Arrow routing",
    "alora_invocation_tokens": "activated LoRA",
    "modules_to_save": "replacing whole modules",
    "trainable_token_indices": "replacing embeddings of single tokens",
    "target_parameters": "changing parameters of modules without a LoRA layer",
    "layer_replication": "repeating layers",
    "lora_bias": "a bias beside lora_B",
    "fan_in_fan_out": "a base weight stored as [in, out]",
}

# How training began in ways that change the base weights: without that an adapter is not what it was trained to be. PEFT's
# conversion on saving makes it one of the weights as they were, and sets the field to true.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.(?P<part>lora_(embedding_)?[AB])(\.default)?(\.weight)?")
# PEFT adds a copy of the base model's own weight when an embedding or output layer has an adapter.
_BASE_COPY = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.weight")
_LINEAR, _EMBEDDING = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")


@dataclasses.dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one module: x -> scale * (x @ a.T) @ b.T. Of an embedding, x is a one-hot row."""

    a: np.ndarray  # [rank, in] in the file's type; of an embedding [rank, vocabulary]
    b: np.ndarray  # [out, rank]
    scale: float
    is_embedding: bool = False

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """An adapter's matrices, by Hugging Face's name of the module: "model.layers.0.self_attn.q_proj". Never empty."""

    modules: dict[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest of the modules'."""
        return max(module.rank for module in self.modules.values())


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """What adapter_config.json says that matters to an adapter that is nothing but LoRA."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]  # by regular expressions of how modules' names end; the first that matches counts
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...] | None  # as given; which modules have matrices is for the weights to say

    @property
    def rank(self) -> int:
        """The largest that a module may have."""
        return max(self.r, *self.rank_pattern.values())

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_matching_pattern(self.rank_pattern, module), self.r)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = self.alpha_pattern.get(_matching_pattern(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(path: str) -> PeftConfig:
    """The config of the adapter in folder `path`; ValueError if it is missing or damaged or asks for more than LoRA."""
    file = _file_in(path, CONFIG_FILE)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} must hold a JSON object.")
    _refuse_more_than_lora(file, raw)
    targets = raw.get("target_modules")
    return PeftConfig(
        r=_rank(file, "r", raw.get("r", _DEFAULT_RANK)),
        lora_alpha=_alpha(file, "lora_alpha", raw.get("lora_alpha", _DEFAULT_ALPHA)),
        use_rslora=bool(raw.get("use_rslora")),
        rank_pattern={key: _rank(file, "rank_pattern", value) for key, value in _patterns(file, raw, "rank_pattern")},
        alpha_pattern={key: _alpha(file, "alpha_pattern", value) for key, value in _patterns(file, raw, "alpha_pattern")},
        target_modules=tuple(map(str, targets)) if isinstance(targets, list) else targets and str(targets),
    )


def read_adapter(path: str) -> PeftAdapter:
    """The adapter in folder `path`, whole; ValueError if it is missing or damaged or more than LoRA."""
    config, file = read_config(path), _file_in(path, WEIGHTS_FILE)
    try:
        with safe_open(file, framework="numpy") as tensors:
            pairs = _find_pairs(file, tensors)
            _check_ranks(file, config, pairs)
            return PeftAdapter({module: _read_pair(file, tensors, config, module, pair) for module, pair in pairs.items()})
    except (SafetensorError, OSError) as error:
        raise ValueError(_damaged(file, error)) from error


def target_suffixes(path: str) -> frozenset[str]:
    """The last parts of the names of the modules that have matrices: {"q_proj", "v_proj"}.

    Reads the header of the weights and nothing else, as does largest_rank. ValueError if it is missing, damaged, or lists
    more than LoRA's tensors.
    """
    return frozenset(module.rpartition(".")[2] for module in _read_header(path))


def largest_rank(path: str) -> int:
    """By the shapes of the matrices; at least 1. Errors as of target_suffixes."""
    return max(pair.rank for pair in _read_header(path).values())


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The tensors of one module, by name."""

    a: str
    b: str
    rank: int
    is_embedding: bool


def _matching_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first that matches, as peft.utils.other.get_pattern_key finds it: the whole name, or what follows one of its dots."""
    return next((key for key in patterns if re.match(_ending(key), module)), module)


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _file_in(path: str, name: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; an adapter must be a folder with {CONFIG_FILE} and {WEIGHTS_FILE}.")
    if not (folder / name).is_file():
        hint = ""
        if name == WEIGHTS_FILE and (folder / _PICKLED_FILE).is_file():
            hint = f" It holds {_PICKLED_FILE}, which is not read; convert it to safetensors."
        raise ValueError(f"{folder} holds no {name}, which an adapter needs.{hint}")
    return folder / name


def _damaged(file: Path, error: Exception) -> str:
    size = file.stat().st_size if file.exists() else 0
    return f"{file} ({size} bytes) is cut off or not a safetensors file: {error}"


def _refuse_more_than_lora(file: Path, raw: dict[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise ValueError(f'{file}: peft_type is {_shown(raw.get("peft_type"))}, but must be "LORA".')
    if raw.get("bias", "none") != "none":
        raise ValueError(f'{file}: bias is {_shown(raw["bias"])}, but must be "none": trained biases are not supported.')
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{file}: init_lora_weights is {_shown(start)}, with which training changes the base weights; save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion."
        )
    for field, method in _REFUSED.items():
        if raw.get(field):
            raise ValueError(f"{file}: {field} is {_shown(raw[field])}, but {method} is not supported.")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_LEN else f"{text[:_SHOWN_LEN]}..."


def _rank(file: Path, field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{file}: {field} has {_shown(value)} as a rank, which must be an integer of at least 1.")
    return value


def _alpha(file: Path, field: str, value: Any) -> float:
    # The comparison is false of NaN, and does not overflow as float() does.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{file}: {field} has {_shown(value)} as alpha, which must be a finite number.")
    return float(value)


def _patterns(file: Path, raw: dict[str, Any], field: str) -> list[tuple[str, Any]]:
    patterns = raw.get(field) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{file}: {field} is {_shown(patterns)}, but must be an object of patterns.")
    for pattern in patterns:
        try:
            re.compile(_ending(pattern))
        except re.error as error:
            raise ValueError(
                f"{file}: {field} has the pattern {_shown(pattern)}, which must be a regular expression: {error}."
            ) from error
    return list(patterns.items())


def _read_header(path: str) -> dict[str, _Pair]:
    file = _file_in(path, WEIGHTS_FILE)
    try:
        with safe_open(file, framework="numpy") as tensors:
            return _find_pairs(file, tensors)
    except (SafetensorError, OSError) as error:
        raise ValueError(_damaged(file, error)) from error


def _find_pairs(file: Path, tensors: Any) -> dict[str, _Pair]:
    """By module, from the header of the open file; ValueError unless the tensors are LoRA's and fit each other."""
    names_of = _names_by_module(file, list(tensors.keys()))
    if not names_of:
        raise ValueError(f"{file} holds no tensors; an adapter needs lora_A and lora_B of at least one module.")
    return {module: _pair(file, tensors, module, names) for module, names in names_of.items()}


def _names_by_module(file: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Module -> lora_A, lora_B or the embedding's -> the tensor's name in the file."""
    found = {name: match for name in names if (match := _TENSOR.fullmatch(name))}
    names_of: dict[str, dict[str, str]] = {match["module"]: {} for match in found.values()}
    for name in names:
        if name in found:
            module, part = found[name]["module"], found[name]["part"]
            if part in names_of[module]:
                raise ValueError(f"{file}: tensors {names_of[module][part]} and {name} are both {part} of one module.")
            names_of[module][part] = name
        elif not ((copy := _BASE_COPY.fullmatch(name)) and copy["module"] in names_of):
            raise ValueError(
                f"{file}: tensor {name} is not lora_A or lora_B of a module; adapters with other tensors are not supported."
            )
    return names_of


def _pair(file: Path, tensors: Any, module: str, names: dict[str, str]) -> _Pair:
    parts = tuple(sorted(names))
    if parts not in (_LINEAR, _EMBEDDING):
        raise ValueError(
            f"{file}: module {module} has {' and '.join(parts)}; it must have {' and '.join(_LINEAR)},"
            f" or {' and '.join(_EMBEDDING)}."
        )
    a, b = (names[part] for part in parts)
    for name in (a, b):
        if (dtype := tensors.get_slice(name).get_dtype()) not in _READABLE_TYPES:
            raise ValueError(f"{file}: tensor {name} has type {dtype}; types that can be read: {', '.join(_READABLE_TYPES)}.")
    a_shape, b_shape = (list(tensors.get_slice(name).get_shape()) for name in (a, b))
    if len(a_shape) != 2 or len(b_shape) != 2 or a_shape[0] != b_shape[1] or 0 in (*a_shape, *b_shape):
        raise ValueError(
            f"{file}: tensors {a} and {b} have shapes {a_shape} and {b_shape}; they must be [rank, in] and [out, rank]."
        )
    return _Pair(a, b, rank=a_shape[0], is_embedding=parts == _EMBEDDING)


def _check_ranks(file: Path, config: PeftConfig, pairs: dict[str, _Pair]) -> None:
    for module, pair in pairs.items():
        if pair.rank != config.rank_of(module):
            raise ValueError(
                f"{file}: module {module} has rank {pair.rank}, but {CONFIG_FILE} says {config.rank_of(module)};"
                " the scale depends on it."
            )


def _read_pair(file: Path, tensors: Any, config: PeftConfig, module: str, pair: _Pair) -> LowRank:
    a, b = (_read_finite(file, tensors, name) for name in (pair.a, pair.b))
    return LowRank(a, b, config.scale_of(module), pair.is_embedding)


def _read_finite(file: Path, tensors: Any, name: str) -> np.ndarray:
    tensor: np.ndarray = tensors.get_tensor(name)
    if not np.isfinite(tensor).all():
        raise ValueError(f"{file}: tensor {name} holds NaN or infinity.")
    return tensor
