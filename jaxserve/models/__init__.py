"""Models: config, weights and the decoder. Names that need JAX are imported when they are first asked for, so that a process
which only wants a model's config does not start JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.models.config import ModelConfig, generation_defaults
from jaxserve.models.families import Family, FamilyTraits, families
from jaxserve.models.location import model_folder
from jaxserve.models.rope_config import RopeConfig
from jaxserve.models.specs import DenseMLPSpec, LatentAttentionSpec, LayerSpec, MoESpec, NormSpec, RouterSpec, SelfAttentionSpec
from jaxserve.models.stage import Stage, divide_layers

if TYPE_CHECKING:
    from jaxserve.models.arrays import ALL_AXES, DATA_AXIS, TENSOR_AXIS, ArrayInfo
    from jaxserve.models.blocks.attend import Attend
    from jaxserve.models.context import OfAllShards, StepContext
    from jaxserve.models.conversion import convert
    from jaxserve.models.decoder import Decoder, ParamTree, abstract_params, build_decoder, check_tp
    from jaxserve.models.exchange import AllHere, Exchange, GatherAll, PackAll, own_lines
    from jaxserve.models.loading import check_params, load_params
    from jaxserve.models.safetensors_files import CheckpointError

_LAZY = {
    "ALL_AXES": "arrays",
    "AllHere": "exchange",
    "DATA_AXIS": "arrays",
    "TENSOR_AXIS": "arrays",
    "ArrayInfo": "arrays",
    "Attend": "blocks.attend",
    "CheckpointError": "safetensors_files",
    "Decoder": "decoder",
    "ParamTree": "decoder",
    "StepContext": "context",
    "Exchange": "exchange",
    "GatherAll": "exchange",
    "OfAllShards": "context",
    "PackAll": "exchange",
    "abstract_params": "decoder",
    "build_decoder": "decoder",
    "check_params": "loading",
    "check_tp": "decoder",
    "convert": "conversion",
    "load_params": "loading",
    "own_lines": "exchange",
}

__all__ = [
    "ALL_AXES",
    "DATA_AXIS",
    "TENSOR_AXIS",
    "AllHere",
    "ArrayInfo",
    "Attend",
    "CheckpointError",
    "Decoder",
    "DenseMLPSpec",
    "Exchange",
    "Family",
    "FamilyTraits",
    "GatherAll",
    "LatentAttentionSpec",
    "LayerSpec",
    "MoESpec",
    "ModelConfig",
    "NormSpec",
    "OfAllShards",
    "PackAll",
    "ParamTree",
    "RopeConfig",
    "RouterSpec",
    "SelfAttentionSpec",
    "Stage",
    "StepContext",
    "abstract_params",
    "build_decoder",
    "check_params",
    "check_tp",
    "convert",
    "divide_layers",
    "families",
    "generation_defaults",
    "load_params",
    "model_folder",
    "own_lines",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxserve.models.{_LAZY[name]}"), name)
