"""Which config a kernel runs with: the one a table names for this device and shape, or the kernel's own default.

Tables are JSON, written by `jaxserve bench kernels --tune`:

    {"NVIDIA H200": {"decode 32/8 heads, D 128/128, pages of 64, bfloat16": {"block_kv": 64, ...}, ...},
     "TPU v6 lite": {"extend 32/8 heads, D 128/128, pages of 128, bfloat16": {"tile_tokens": 64, ...}, ...}, ...}

The one that comes with jaxserve is `tuned.json` beside this file; the file that JAXSERVE_TUNING_FILE names goes before it.
Only configs that were measured stand in a table. What a TPU kernel runs with otherwise comes from a cost model,
pallas/tpu/tuning.py. Configs are read while a step is traced, never while it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.kernels.spec import QUANTIZED_DTYPES

if TYPE_CHECKING:
    from jaxserve.kernels.pallas.gpu.decode import DecodeConfig
    from jaxserve.kernels.pallas.gpu.extend import ExtendConfig

TUNING_FILE_VARIABLE = "JAXSERVE_TUNING_FILE"
PACKAGED_FILE = "tuned.json"

Table = Mapping[str, Mapping[str, Mapping[str, Any]]]  # device kind -> shape key -> fields of a config
Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """What a tuned config belongs to: one shard's heads and pages. Batch and lengths vary from step to step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    kv_dtype: str

    def key(self, op: str) -> str:
        return (
            f"{op} {self.num_heads}/{self.num_kv_heads} heads, D {self.head_dim}/{self.head_dim_v}, "
            f"pages of {self.page_size}, {self.kv_dtype}"
        )


def decode_config(device_kind: str, shape: KernelShape) -> DecodeConfig:
    """Of a GPU. ValueError, naming the file, if a table holds no DecodeConfig, or one that the kernel can not run with."""
    from jaxserve.kernels.pallas.gpu.decode import DecodeConfig

    dims, is_quantized = (shape.head_dim, shape.head_dim_v), shape.kv_dtype in QUANTIZED_DTYPES
    default = DecodeConfig.for_heads(*dims, is_quantized=is_quantized)
    return tuned(device_kind, shape.key("decode"), default, lambda config: config.problem(*dims, is_quantized))


def extend_config(device_kind: str, shape: KernelShape) -> ExtendConfig:
    """Of a GPU. ValueError, naming the file, if a table holds no ExtendConfig, or one that the kernel can not run with."""
    from jaxserve.kernels.pallas.gpu.extend import ExtendConfig

    dims, is_quantized = (shape.head_dim, shape.head_dim_v), shape.kv_dtype in QUANTIZED_DTYPES
    default = ExtendConfig.for_heads(*dims, is_quantized=is_quantized)
    return tuned(device_kind, shape.key("extend"), default, lambda config: config.problem(*dims, is_quantized))


def tuned(
    device_kind: str, key: str, default: Config, problem_of: Callable[[Config], str | None] = lambda config: None
) -> Config:
    """`default` with the fields that the first table with this device and key names.

    ValueError, naming the file, if they are no such config's, or if `problem_of` has a reason against what comes out.
    """
    for source, table in _tables():
        fields = table.get(device_kind, {}).get(key)
        if fields is not None:
            where = f"{source}: {device_kind}: {key}"
            config = _with_fields(default, fields, where)
            problem = problem_of(config)
            if problem is not None:
                raise ValueError(f"{where}: {problem}")
            return config
    return default


def _with_fields(default: Config, fields: Mapping[str, Any], where: str) -> Config:
    assert dataclasses.is_dataclass(default) and not isinstance(default, type)
    kinds = {field.name: type(getattr(default, field.name)) for field in dataclasses.fields(default)}
    for name, value in fields.items():
        if name not in kinds:
            raise ValueError(f"{where}: there is no {name!r}; known are {', '.join(kinds)}.")
        if type(value) is not kinds[name]:
            raise ValueError(f"{where}: {name} must be of type {kinds[name].__name__}; got {value!r}.")
    return dataclasses.replace(default, **fields)


def _tables() -> list[tuple[str, Table]]:
    """(where it comes from, table), the user's first."""
    tables = [(PACKAGED_FILE, packaged_table())]
    path = os.environ.get(TUNING_FILE_VARIABLE)
    return [(path, load_table(path)), *tables] if path else tables


@functools.cache
def packaged_table() -> Table:
    return _checked(importlib.resources.files("jaxserve.kernels").joinpath(PACKAGED_FILE).read_text(), PACKAGED_FILE)


def load_table(path: str | Path) -> Table:
    """ValueError with a sentence if the file is missing or is no table."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"The tuning file {path} cannot be read: {error.strerror}.") from error
    return _checked(text, str(path))


def _checked(text: str, source: str) -> Table:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error
    is_table = isinstance(table, dict) and all(
        isinstance(shapes, dict) and all(isinstance(fields, dict) for fields in shapes.values()) for shapes in table.values()
    )
    if not is_table:
        raise ValueError(f"{source} must hold an object: device kind -> shape -> fields of a config.")
    return table
