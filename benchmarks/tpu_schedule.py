"""How long the TPU attention kernels compute, by the schedule libtpu makes, beside what the chip would need at its peaks.

    python -m benchmarks.tpu_schedule [--chips v6e tpu7x] [--ops decode] [--json]

Needs JAX 0.11.2 or newer and libtpu (pip install 'jax[tpu]'), no TPU. A turn is one product's worth of work: one KV head, the
rows of a query tile, one chunk of keys, without a mask where the kernel has code for that. Its cycles are the bundles between
two branches (jaxserve.aot.tpu_schedule).

decode: beside them, the cycles in which HBM brings the keys and values of a turn; a share above 1 means that the kernel
computes longer than it waits. extend: the share of the matrix units' peak. Half of it is all there is where head_dim is 128,
which fills half the width of a v6e's or TPU7x's matrix unit, and a quarter where it is 64.
"""

from __future__ import annotations

import argparse
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
from jaxserve.bench.inputs import AttentionCase, make_inputs
from jaxserve.bench.shapes import Shape
from jaxserve.bench.tpu import TpuKernels
from jaxserve.kernels.pallas.tpu_layout import RowLayout
from jaxserve.kernels.pallas.tpu_tuning import CHIPS, TpuChip
from jaxserve.kernels.spec import Chip

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
SHAPES = {
    "32/8 heads": Shape(32, 8, page_size=128),
    "8/1 heads": Shape(8, 1, page_size=128),
    "16/16 heads": Shape(16, 16, page_size=128),
    "D 64": Shape(32, 8, 64, page_size=128),
    "D 256": Shape(16, 4, 256, page_size=128),
    "int8 KV": Shape(page_size=128, kv_dtype="int8"),
    "fp8 KV": Shape(page_size=128, kv_dtype="float8_e4m3fn"),
}
ROWS = {"decode": ((1, 600),) * 16, "extend": ((250, 600), (6, 6))}
VECTOR_LANES = 4 * 8 * 128  # of all vector units, in one cycle


def clock_hz(chip: TpuChip) -> float:
    return chip.vector_ops_per_s / VECTOR_LANES


def measure(chip_name: str, shape_name: str, op: str, folder: Path) -> dict[str, Any]:
    device = parse_target(TOPOLOGIES[chip_name]).devices()[0]
    kernels, shape, chip = TpuKernels(Chip.of(device)), SHAPES[shape_name], CHIPS[device.device_kind]
    config, layout = kernels.default_config(op, shape), RowLayout.of(shape.head_dim)
    _compile(kernels, op, shape, device)
    turns = products(take_blocks(folder, f"paged_{op}"))
    rows = config.tile_tokens * shape.num_heads // shape.num_kv_heads
    cycles = turns[0].cycles / config.head_unroll
    if op == "decode":
        kv_bytes = config.kv_chunk_tokens * layout.width * jnp.dtype(shape.kv_dtype).itemsize
        found = {"hbm_cycles": kv_bytes / chip.hbm_bytes_per_s * clock_hz(chip)}
        found["share"] = cycles / found["hbm_cycles"]
    else:
        flops = 4 * rows * config.kv_chunk_tokens * shape.head_dim
        found = {"mxu_cycles": flops / chip.bf16_flops_per_s * clock_hz(chip)}
        found["share"] = found["mxu_cycles"] / cycles
    sizes = {"rows": rows, "keys": config.kv_chunk_tokens, "heads_side_by_side": config.head_unroll}
    return {"chip": chip_name, "shape": shape_name, "op": op, **sizes, "cycles": cycles, **found}


def _compile(kernels: TpuKernels, op: str, shape: Shape, device: jax.Device) -> None:
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    case = AttentionCase(ROWS[op], *heads, shape.head_dim, page_size=shape.page_size, kv_dtype=shape.kv_dtype)
    inputs = make_inputs(case, calls=1, row_dim=RowLayout.of(shape.head_dim).width)
    runnable = kernels.runnable(op, case, inputs, kernels.default_config(op, shape))
    replicated = NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())
    arguments = (jnp.int32(0), runnable.carry, runnable.operands)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), arguments)
    with jax.sharding.use_abstract_mesh(replicated.mesh.abstract_mesh):
        jax.jit(runnable.call).trace(*shapes).lower().compile()


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
    parser.add_argument("--ops", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    arguments = parser.parse_args()
    found = []
    if not arguments.json:
        print(f"{'chip':7}{'op':8}{'shape':13}{'rows':>6}{'keys':>6}{'heads':>7}{'cycles':>9}{'at peak':>9}{'share':>8}")
    for row in study(arguments.chips, arguments.ops, arguments.shapes):
        found.append(row)
        if not arguments.json:
            peak = row.get("hbm_cycles") or row.get("mxu_cycles")
            sizes = f"{row['rows']:6}{row['keys']:6}{row['heads_side_by_side']:7}"
            print(
                f"{row['chip']:7}{row['op']:8}{row['shape']:13}{sizes}{row['cycles']:9.0f}{peak:9.0f}{row['share']:8.2f}",
                flush=True,
            )
    if arguments.json:
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
