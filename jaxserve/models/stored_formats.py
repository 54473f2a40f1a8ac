"""Checkpoints whose matrices are quantized: read as if they stood there plain, slice by slice.

What config.json calls quantization_config says the format. A reader has the methods of SafetensorsCheckpoint and the names and
shapes of the plain tensors; it decodes no more than the slice that is asked for, to float32. Which tensors are quantized the
files say themselves: those with scales beside them.

fp8: float8_e4m3fn [out, in] and a float32 factor for each block of rows and columns (DeepSeek V3).
mxfp4: 4-bit floats, two in a byte, a power of two for each 32 of them (gpt-oss; OCP Microscaling Formats 1.0, section 5.3).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxserve.models.config import read_quantization
from jaxserve.models.json_files import read_json
from jaxserve.models.safetensors_files import CheckpointError, SafetensorsCheckpoint


class Tensors(Protocol):
    """A checkpoint's plain tensors."""

    def has(self, name: str) -> bool: ...
    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """CheckpointError unless tensor `name` is there with this shape."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor."""
        ...


def open_tensors(folder: Path) -> Tensors:
    """CheckpointError, or ValueError for a format that is not read."""
    checkpoint = SafetensorsCheckpoint(folder)
    quantization = read_quantization(read_json(folder / "config.json", required=False))
    if quantization is None:
        return checkpoint
    if quantization["quant_method"] == "mxfp4":
        return Mxfp4Tensors(checkpoint)
    height, width = quantization["weight_block_size"]
    return Fp8Tensors(checkpoint, (height, width))


# --- fp8

_SCALES = "_scale_inv"
_E4M3 = "F8_E4M3"


@dataclasses.dataclass(frozen=True)
class Fp8Tensors:
    """Of matrices in float8_e4m3fn: weight[r, c] = stored[r, c] * scales[r // rows, c // columns]."""

    checkpoint: SafetensorsCheckpoint
    block: tuple[int, int]

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if self.checkpoint.type_of(name) != _E4M3:
            self.checkpoint.check(name, shape)
            return
        self.checkpoint.check(name, shape, (_E4M3,))
        blocks = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
        self.checkpoint.check(name + _SCALES, blocks)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if self.checkpoint.type_of(name) != _E4M3:
            return self.checkpoint.read(name, index)
        rows, columns = index
        values = _E4M3_VALUES[self.checkpoint.read_bytes(name, index)]
        height, width = self.block
        blocks = slice(rows.start // height, -(-rows.stop // height)), slice(columns.start // width, -(-columns.stop // width))
        scales = self.checkpoint.read(name + _SCALES, blocks).astype(np.float32)
        of_rows = np.arange(rows.start, rows.stop) // height - blocks[0].start
        of_columns = np.arange(columns.start, columns.stop) // width - blocks[1].start
        return np.asarray(values * scales[of_rows][:, of_columns])


def _e4m3_values() -> np.ndarray:
    """float32 [256]: what each byte stands for. Four bits of exponent with bias 7, three of mantissa, no infinities."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -size, size).astype(np.float32)


_E4M3_VALUES = _e4m3_values()

# --- mxfp4

_MX_GROUP = 32  # numbers with one scale, along the input
_MX_BIAS = 127
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensors:
    """Of experts' X [experts, in, out] files have X_blocks uint8 [experts, out, in / 32, 16], the lower half of a byte first,
    and X_scales uint8 [experts, out, in / 32]."""

    checkpoint: SafetensorsCheckpoint

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name) or self.checkpoint.has(f"{name}_blocks")

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._is_packed(name):
            self.checkpoint.check(name, shape)
            return
        experts, size_in, size_out = shape
        if size_in % _MX_GROUP:
            raise CheckpointError(f"tensor {name}: its input must be a multiple of {_MX_GROUP} for mxfp4, got {size_in}.")
        groups = size_in // _MX_GROUP
        self.checkpoint.check(f"{name}_blocks", (experts, size_out, groups, _MX_GROUP // 2), ("U8",))
        self.checkpoint.check(f"{name}_scales", (experts, size_out, groups), ("U8",))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if not self._is_packed(name):
            return self.checkpoint.read(name, index)
        experts, ins, outs = index
        groups = slice(ins.start // _MX_GROUP, -(-ins.stop // _MX_GROUP))
        blocks = self.checkpoint.read(f"{name}_blocks", (experts, outs, groups, slice(0, _MX_GROUP // 2)))
        scales = self.checkpoint.read(f"{name}_scales", (experts, outs, groups))
        values = np.empty((*blocks.shape[:-1], _MX_GROUP), np.float32)
        values[..., 0::2], values[..., 1::2] = _E2M1_VALUES[blocks & 15], _E2M1_VALUES[blocks >> 4]
        values *= np.exp2(scales.astype(np.float32) - _MX_BIAS)[..., None]
        whole = values.reshape(*values.shape[:2], -1)
        first = ins.start - groups.start * _MX_GROUP
        return whole[..., first : first + ins.stop - ins.start].swapaxes(1, 2)

    def _is_packed(self, name: str) -> bool:
        return not self.checkpoint.has(name) and self.checkpoint.has(f"{name}_blocks")
