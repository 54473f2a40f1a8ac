"""WeightLoader: the weights of one model, from whatever folder holds them, for one mesh: at start-up and to replace them.

It knows what the served model looks like; not who uses the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import psutil
from jax.sharding import Mesh

from jaxserve.executor.mesh import platform_of
from jaxserve.executor.step import Params
from jaxserve.models import ModelConfig, Stage, check_params, load_params
from jaxserve.models.given_tensors import GivenTensor
from jaxserve.models.tensor_update import TensorUpdate, check

# What may differ between checkpoints of one model: how they are stored, and where a text ends and how long it may be, which is
# decided at start.
_MAY_DIFFER = ("dtype", "eos_token_ids", "max_len")
# What the server's options make of a model, whatever its weights.
_OF_OPTIONS = ("quantization", "native_products", "fp32_lm_head", "expert_placement", "attn_dp_size", "batch_invariant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLoader:
    config: ModelConfig  # of the model that is served, for sequences of at most
    context_len: int
    stages: tuple[tuple[Stage | None, Mesh], ...]  # its parts, and where they are
    dtype: Any
    model_override_args: str  # JSON, as --json-model-override-args

    def load(self, path: str, load_format: str, *, progress: bool = False) -> tuple[Params, ...]:
        """Of each stage. Raises ValueError or OSError with a sentence."""
        return tuple(
            load_params(path, self.config.replace(stage=stage), mesh, self.dtype, load_format=load_format, progress=progress)
            for stage, mesh in self.stages
        )

    def check_files(self, path: str, load_format: str) -> None:
        """ValueError or OSError with a sentence if a tensor is missing or has another shape. Reads no weights."""
        for stage, mesh in self.stages:
            check_params(path, self.config.replace(stage=stage), mesh, self.dtype, load_format)

    def check(self, path: str, load_format: str) -> None:
        """ValueError or OSError if the folder holds another model, or if a tensor is missing or has another shape."""
        if not path or not Path(path).is_dir():
            raise ValueError(f"model_path {path!r} is not a folder.")
        overrides, is_embedding = json.loads(self.model_override_args), not self.config.generates
        found = ModelConfig.from_pretrained(path, overrides, is_embedding=is_embedding)
        difference = _first_difference(self._comparable(self.config), self._comparable(found))
        if difference is not None:
            name, served, other = difference
            raise ValueError(f"{path} holds another model: its {name} is {other!r}, that of the served one {served!r}.")
        self.check_files(path, load_format)

    def check_tensors(self, params: tuple[Params, ...] | None, given: Mapping[str, GivenTensor], *, partial: bool) -> None:
        """ValueError with all that keeps `replace_tensors` from using them in place of `params`. None: released."""
        if params is None and partial:
            raise ValueError("The weights are released: all tensors must be given, not a part of them.")
        check(self._updates, given, partial=partial)

    def replace_tensors(self, params: tuple[Params, ...] | None, given: Mapping[str, GivenTensor]) -> tuple[Params, ...]:
        """Of each stage, in the memory of `params`, which are deleted if there is an exception. `given` is checked."""
        old: list[Params | None] = [None] * len(self._updates) if params is None else [*params]
        replaced: list[Params] = []
        try:
            for update, of_stage in zip(self._updates, old, strict=True):
                replaced.append(update.apply(of_stage, given))
        except BaseException:
            delete((old, replaced))
            raise
        return tuple(replaced)

    @functools.cached_property
    def _updates(self) -> tuple[TensorUpdate, ...]:
        return tuple(TensorUpdate(self.config.replace(stage=stage), mesh, self.dtype) for stage, mesh in self.stages)

    @property
    def loads_beside(self) -> bool:
        """Whether other weights are loaded while these are there. Not on an accelerator: its memory is divided, and weights in
        the room that steps need would leave it in pieces."""
        return platform_of(self.stages[0][1]) == "cpu"

    def fits_on_host(self, params: tuple[Params, ...]) -> bool:
        """A second set of these."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) <= psutil.virtual_memory().available

    def _comparable(self, config: ModelConfig) -> ModelConfig:
        config = config.for_context(self.context_len)
        return config.replace(**{name: getattr(self.config, name) for name in (*_MAY_DIFFER, *_OF_OPTIONS)})


def delete(arrays: Any) -> None:
    """All in a tree; what is deleted already stays so."""
    for leaf in jax.tree.leaves(arrays):
        leaf.delete()


def _first_difference(served: Any, other: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Name and values of the first thing that differs, looked for inside of dataclasses and tuples of one length."""
    if served == other:
        return None
    if dataclasses.is_dataclass(served) and type(served) is type(other):
        parts = [(field.name, getattr(served, field.name), getattr(other, field.name)) for field in dataclasses.fields(served)]
    elif isinstance(served, tuple) and isinstance(other, tuple) and len(served) == len(other):
        parts = [(str(index), *pair) for index, pair in enumerate(zip(served, other, strict=True))]
    elif isinstance(served, tuple) and isinstance(other, tuple):
        return f"number of {name}", len(served), len(other)
    else:
        return name, served, other
    inside = (_first_difference(mine, theirs, f"{name}.{part}" if name else part) for part, mine, theirs in parts)
    return next((found for found in inside if found is not None), (name, served, other))
