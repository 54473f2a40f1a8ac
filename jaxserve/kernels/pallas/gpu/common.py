"""What all Mosaic GPU kernels share: shared-memory layout, rounding, compiler parameters. It knows no attention.

Written for JAX 0.11.2 up to 0.12.0: out_type and scratch_types, an explicit number of barriers, Warpgroup semantics.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)

# Shared memory that one block may use on sm_90: 228 KB of an SM less 1 KB that the driver keeps.
SMEM_BYTES = 227 * 1024

REGISTERS = 64 * 1024  # of a multiprocessor, 32 bits each

# JAX 0.12 has kernels compiled as relocatable code, where ptxas gives no warpgroup more registers than all have at the entry
# and says that it ignores setmaxnreg.
MOVES_REGISTERS = jax.__version_info__ < (0, 12)

# TMA boxes and SMEM slices of a swizzled buffer move whole groups of this many rows.
ROW_GROUP = 8


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


def transforms(columns: int, dtype: Any) -> tuple[Any, Any]:
    """Tiling and the widest swizzle (bytes) that `columns` of `dtype` allow: what wgmma and TMA want of a 2-D buffer.

    Raises ValueError where a row is no multiple of 32 bytes, which no swizzle covers.
    """
    itemsize = jnp.dtype(dtype).itemsize
    for swizzle in (128, 64, 32):
        if columns * itemsize % swizzle == 0:
            return plgpu.TilingTransform((ROW_GROUP, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
    raise ValueError(f"a row of {columns} {jnp.dtype(dtype).name} is no multiple of 32 bytes")


def value_transforms(tokens: int, columns: int, dtype: Any) -> tuple[Any, Any]:
    """The same for a tile of values [tokens, columns]: there wgmma also wants tokens in whole widths of the swizzle."""
    return transforms(math.gcd(tokens, columns), dtype)


def compiler_params(*, auto_barriers: bool = True) -> Any:
    """Approximate math: exp2 and tanh are the hardware's instructions (tanh's relative error is about 2**-11).

    With `auto_barriers` a warpgroup's threads meet before and after each store and before each copy to shared memory. A kernel
    without them must say at each place why its threads need not, or have them meet with commit_smem.
    """
    return plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        unsafe_no_auto_barriers=not auto_barriers,
    )


def set_max_registers(count: int, action: Literal["increase", "decrease"]) -> None:
    """This warpgroup's registers per thread from here on, where the compiler allows warpgroups to have different numbers."""
    if MOVES_REGISTERS:
        plgpu.set_max_registers(count, action=action)


class _Registers(Protocol):
    @property
    def producer_registers(self) -> int: ...
    @property
    def consumer_registers(self) -> int: ...


def resources_problem(config: _Registers, producers: int, consumers: int, smem_bytes: int) -> str | None:
    """Why a block of so many warpgroups can not have what it asks for, as a sentence, or None."""
    for name in ("producer_registers", "consumer_registers"):
        if getattr(config, name) not in range(24, 257, 8):
            return f"{name} must be a multiple of 8 from 24 to 256, not {getattr(config, name)}"
    warpgroups = producers + consumers
    had = warpgroups * (REGISTERS // (warpgroups * 128) // 8 * 8)  # all start with as many, by eights
    asked = producers * config.producer_registers + consumers * config.consumer_registers
    # One that asks for more than there are waits forever. Two have the most a thread can have, and do not ask.
    if warpgroups > 2 and asked > had:
        return f"producer_registers and consumer_registers add up to {asked} a thread of each warpgroup; there are {had}"
    if smem_bytes > SMEM_BYTES:
        return f"{config} takes {smem_bytes} bytes of shared memory; there are {SMEM_BYTES}"
    return None
