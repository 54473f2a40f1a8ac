"""How long the TPU attention kernels compute, by the schedule libtpu makes, beside what the chip would need at its peaks.

    python -m benchmarks.tpu_schedule [--chips v6e tpu7x] [--ops decode] [--json]

Needs JAX 0.11.2 or newer and libtpu (pip install 'jax[tpu]'), no TPU. A turn is one product's worth of work: one KV head, the
rows of a query tile, one chunk of keys, without a mask where the kernel has code for that. Its cycles are the bundles between
two branches (jaxserve.aot.tpu_schedule).

decode: beside them, the cycles in which HBM brings the keys and values of a turn; a share above 1 means that the kernel
computes longer than it waits. extend: the share of the matrix units' peak. Half of it is all there is where head_dim is 128,
which fills half the width of a v6e's or TPU7x's matrix unit, and a quarter where it is 64. MLA has rows of 512 + 64.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.aot.targets import parse_target, without_devices
from jaxserve.aot.tpu_schedule import dumped_schedules, products, take_blocks
from jaxserve.kernels.pallas.tpu.attention import paged_attention
from jaxserve.kernels.pallas.tpu.layout import RowLayout
from jaxserve.kernels.pallas.tpu.plan import plan_step
from jaxserve.kernels.pallas.tpu.tuning import CHIPS, PassConfig, PassShape, TpuChip, TpuConfig, config_of
from jaxserve.kernels.spec import QUANTIZED_DTYPES

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
PAGE_SIZE, DTYPE = 128, "bfloat16"
OPS = ("decode", "extend")
# Layout of a row, query heads, KV heads, type of the KV cache.
SHAPES = {
    "32/8 heads": (RowLayout.of(128), 32, 8, DTYPE),
    "8/1 heads": (RowLayout.of(128), 8, 1, DTYPE),
    "16/16 heads": (RowLayout.of(128), 16, 16, DTYPE),
    "D 64": (RowLayout.of(64), 32, 8, DTYPE),
    "D 256": (RowLayout.of(256), 16, 4, DTYPE),
    "int8 KV": (RowLayout.of(128), 32, 8, "int8"),
    "fp8 KV": (RowLayout.of(128), 32, 8, "float8_e4m3fn"),
    "MLA, 128": (RowLayout.latent(512, 64), 128, 1, DTYPE),
    "MLA, 16": (RowLayout.latent(512, 64), 16, 1, DTYPE),
}
VECTOR_LANES = 4 * 8 * 128  # of all vector units, in one cycle


def clock_hz(chip: TpuChip) -> float:
    return chip.vector_ops_per_s / VECTOR_LANES


def passes(chip_name: str, shape_name: str) -> tuple[jax.Device, PassShape, PassShape, TpuConfig]:
    """The chip, the decode and the extend pass, and the config they run with."""
    device = parse_target(TOPOLOGIES[chip_name]).devices()[0]
    layout, num_heads, num_kv_heads, kv_dtype = SHAPES[shape_name]
    decode = PassShape(layout, num_heads, num_kv_heads, PAGE_SIZE, DTYPE, kv_dtype, is_decode=True)
    extend = dataclasses.replace(decode, is_decode=False)
    return device, decode, extend, config_of(decode, extend, device.device_kind)


def measure(chip_name: str, shape_name: str, op: str, folder: Path) -> dict[str, Any]:
    device, decode, _, both = passes(chip_name, shape_name)
    chip, layout = CHIPS[device.device_kind], decode.layout
    lower(chip_name, shape_name, op).compile()
    config: PassConfig = getattr(both, op)
    turns = products(take_blocks(folder, f"paged_{op}"))
    rows, keys = config.tile_tokens * decode.group, config.kv_chunk_tokens
    cycles = turns[0].cycles / config.head_unroll
    if op == "decode":
        kv_bytes = keys * layout.width * decode.kv_bytes
        at_peak = kv_bytes / chip.hbm_bytes_per_s * clock_hz(chip)
        share = cycles / at_peak
    else:
        flops = 2 * rows * keys * (layout.key_dim + layout.value_dim)
        at_peak = flops / chip.bf16_flops_per_s * clock_hz(chip)
        share = at_peak / cycles
    sizes = {"rows": rows, "keys": keys, "heads_side_by_side": config.head_unroll}
    return {"chip": chip_name, "op": op, "shape": shape_name, **sizes, "cycles": cycles, "at_peak": at_peak, "share": share}


def lower(chip_name: str, shape_name: str, op: str) -> Any:
    """A step of 64 rows, for a chip that is not there, as a jax.stages.Lowered."""
    device, _, shape, config = passes(chip_name, shape_name)
    decode_q_len = 1 if op == "decode" else None
    replicated = NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=replicated)
    num_rows, num_tokens, num_pages, layout = 64, 64 if decode_q_len else 1024, 512, shape.layout

    def step(q: jax.Array, pool: jax.Array, scales: jax.Array | None, batch: Any) -> jax.Array:
        plan = plan_step(**batch, decode_q_len=decode_q_len, page_size=PAGE_SIZE, config=config)
        limit = config.vmem_limit_bytes
        return paged_attention(q, pool, scales, plan, 0, layout=layout, scale=0.1, vmem_limit_bytes=limit)

    q = array((num_tokens, shape.num_heads, layout.key_dim), jnp.dtype(shape.dtype))
    pool = array((num_pages, *layout.page_shape(shape.num_kv_heads, PAGE_SIZE)), jnp.dtype(shape.kv_dtype))
    is_quantized = shape.kv_dtype in QUANTIZED_DTYPES
    scales = array((num_pages, 2 * shape.num_kv_heads, PAGE_SIZE), jnp.float32) if is_quantized else None
    sizes = {"kv_lens": (num_rows,), "cu_q_lens": (num_rows + 1,), "page_table": (num_rows, 32)}
    sizes |= {"slot_pages": (num_tokens,), "slot_offsets": (num_tokens,)}
    batch = {name: array(size, jnp.int32) for name, size in sizes.items()}
    with jax.sharding.use_abstract_mesh(replicated.mesh.abstract_mesh):
        return jax.jit(step).trace(q, pool, scales, batch).lower()


def study(chips: list[str], ops: list[str], shapes: list[str]) -> Iterator[dict[str, Any]]:
    without_devices()
    with dumped_schedules() as folder:
        for chip in chips:
            for op in ops:
                for shape in shapes:
                    yield measure(chip, shape, op, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    arguments = parser.parse_args()
    found = []
    if not arguments.json:
        print(f"{'chip':7}{'op':8}{'shape':13}{'rows':>6}{'keys':>6}{'heads':>7}{'cycles':>9}{'at peak':>9}{'share':>8}")
    for row in study(arguments.chips, arguments.ops, arguments.shapes):
        found.append(row)
        if not arguments.json:
            sizes = f"{row['rows']:6}{row['keys']:6}{row['heads_side_by_side']:7}"
            cycles = f"{row['cycles']:9.0f}{row['at_peak']:9.0f}{row['share']:8.2f}"
            print(f"{row['chip']:7}{row['op']:8}{row['shape']:13}{sizes}{cycles}", flush=True)
    if arguments.json:
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
