"""Models: config, weights and the decoder. Names that need JAX are imported when they are first asked for, so that a process
which only wants a model's config does not start JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.models.config import ModelConfig, generation_defaults
from jaxserve.models.registry import FAMILIES, Family, FamilyTraits
from jaxserve.models.rope_config import RopeConfig

if TYPE_CHECKING:
    from jaxserve.models.conversion import convert
    from jaxserve.models.decoder import Decoder, build_decoder
    from jaxserve.models.layers import Attend
    from jaxserve.models.params import ArrayInfo, ParamTree, abstract_params, check_tp, param_shardings, param_specs
    from jaxserve.models.safetensors_files import CheckpointError
    from jaxserve.models.weights import load_params

_LAZY = {
    "ArrayInfo": "params",
    "Attend": "layers",
    "CheckpointError": "safetensors_files",
    "Decoder": "decoder",
    "ParamTree": "params",
    "abstract_params": "params",
    "build_decoder": "decoder",
    "check_tp": "params",
    "convert": "conversion",
    "load_params": "weights",
    "param_shardings": "params",
    "param_specs": "params",
}

__all__ = [
    "FAMILIES",
    "ArrayInfo",
    "Attend",
    "CheckpointError",
    "Decoder",
    "Family",
    "FamilyTraits",
    "ModelConfig",
    "ParamTree",
    "RopeConfig",
    "abstract_params",
    "build_decoder",
    "check_tp",
    "convert",
    "generation_defaults",
    "load_params",
    "param_shardings",
    "param_specs",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxserve.models.{_LAZY[name]}"), name)
