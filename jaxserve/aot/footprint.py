"""What a model takes, from its config alone: parameters, bytes, KV cache of a token, and over how many devices it splits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxserve.aot.roofline import ModelShard
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig, abstract_params, check_tp

_TP_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Of the whole model, before it is split over devices."""

    parameters: int
    weight_bytes: int
    kv_token_bytes: Mapping[int | None, int]  # window (None: sees everything) -> bytes of a token in all layers with it
    state_bytes: int  # of a sequence, in the layers that keep a state
    tp_sizes: tuple[int, ...]  # of the usual ones

    @staticmethod
    def of(config: ModelConfig, dtype: str) -> Footprint:
        """With weights and KV cache of `dtype`. Uses JAX's first device for nothing but its kind, which should be a CPU's."""
        arrays = jax.tree.leaves(abstract_params(config, jnp.dtype(dtype), 1))
        blueprint = Blueprint.draw(ServerArgs(model_path="-", dtype=dtype), config, make_mesh(1, jax.devices()[:1]))
        return Footprint(
            parameters=sum(math.prod(array.shape) for array in arrays),
            weight_bytes=sum(array.num_bytes for array in arrays),
            kv_token_bytes={
                window: page // blueprint.page_size
                for window, page in zip(blueprint.config.kv_windows, blueprint.page_bytes, strict=True)
            },
            state_bytes=ModelShard(config, dtype, 1, 0).state_bytes,
            tp_sizes=tuple(size for size in _TP_SIZES if _splits(config, size)),
        )


def _splits(config: ModelConfig, tp_size: int) -> bool:
    try:
        check_tp(config, tp_size)
    except ValueError:
        return False
    return True
