"""What the GPU kernels' machine code costs an H200, turn by turn of their main loops, and what that predicts of their speed.

    python -m benchmarks.gpu_schedule [--cases "decode bf16" ...] [--json]

Needs jax[cuda13] 0.11.2 or newer and nvdisasm (pip install nvidia-cuda-nvdisasm), no GPU. Nothing is run: a prediction.

First table, a line per main loop: instructions that stand in it; of a turn that meets no edge the instructions, the cycles
that their stall counts add up to, products, copies, block barriers, spills, exponentials, conversions of types. `--paths` adds
the order of all this. Second table, cycles of a multiprocessor per tile of keys: until memory has brought it; issue slots of a
scheduler; tensor cores; shared memory at 128 bytes a cycle (lanes that load one address counted as if they did not); the
special-function and the integer units; a consumer alone, over the warpgroups that work side by side. The largest is the pace.
`T/s` is terabytes of HBM, for extend operations. The prediction is

    decode: time = FIXED_US + tiles per multiprocessor * largest / clock
    extend: time = (tiles + LOST_TURNS per thread block) per multiprocessor * largest / clock, at most SUSTAINED_FLOPS_PER_S

beside the time that the bytes take at the data sheet's bandwidth or the operations at its peak, whichever is longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.device import write
from benchmarks.device.mla import mla_case
from jaxserve.aot.chips import H200
from jaxserve.aot.gpu_schedule import CONVERSIONS, SMEM_BYTES_PER_CYCLE, Role, cycles_alone, events, roles
from jaxserve.aot.sass import Kernel, compile_with_sass
from jaxserve.aot.targets import gpu_devices, without_devices
from jaxserve.bench.attention import MAKERS
from jaxserve.bench.inputs import AttentionCase, decode_case, make_inputs
from jaxserve.kernels import tuning
from jaxserve.kernels.pallas.gpu import mla as gpu_mla
from jaxserve.kernels.pallas.gpu import write as gpu_write
from jaxserve.kernels.pallas.gpu.mla_plan import TILE
from jaxserve.kernels.rotary import Rotary

NUM_SMS = 132  # jaxserve/aot/h200.txtpb
CLOCK_HZ = 1.755e9  # NVIDIA H200 (SXM) under load, assumed; its highest is 1.98e9 (h200.txtpb)
READ_BYTES_PER_S = 4.5e12  # TileOPs, perf/profiles/h200.yaml: 93.8 % of 4.8e12, measured there
SUSTAINED_FLOPS_PER_S = 700e12  # the same: bf16 products of matrices, 70.8 % of 989.5e12
FIXED_US = 12.0  # decode: loads that depend on each other 3, unequal ends 4, combining 5. Estimated, never measured
LOST_TURNS = 2.4  # extend: of a thread block, before its first product and after its last. Estimated, never measured


@dataclasses.dataclass(frozen=True)
class Study:
    kernel: str  # whose loops are read
    op: str  # of jaxserve.bench.attention.MAKERS, or write
    case: AttentionCase | None = None
    kv_dtype: str = "bfloat16"  # of a write


FP8, INT8 = "float8_e4m3fn", "int8"
STUDIES = {
    "decode bf16": Study("paged_decode", "decode", decode_case(64, 4096)),
    "decode fp8": Study("paged_decode", "decode", decode_case(64, 4096, kv_dtype=FP8)),
    "decode int8": Study("paged_decode", "decode", decode_case(64, 4096, kv_dtype=INT8)),
    "decode bf16, pages of 16": Study("paged_decode", "decode", decode_case(64, 4096, page_size=16)),
    "extend bf16": Study("paged_extend", "extend", AttentionCase(((16384, 16384),))),
    "extend fp8": Study("paged_extend", "extend", AttentionCase(((4096, 4096),), kv_dtype=FP8)),
    "mla decode, 128 heads": Study("mla_decode", "mla decode", mla_case(64, 4096, 128)),
    "combine": Study("paged_decode_combine", "decode", decode_case(64, 4096)),
    "mla combine": Study("mla_decode_combine", "mla decode", mla_case(64, 4096, 128)),
    "write bf16": Study("rope_and_write", "write"),
    "write fp8": Study("rope_and_write", "write", kv_dtype=FP8),
}


def lower(study: Study) -> Any:
    """A jax.stages.Lowered for an H200."""
    device = gpu_devices()[0]
    function, arguments = (_write if study.case is None else _attention)(study)
    replicated = NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), arguments)
    with jax.sharding.use_abstract_mesh(replicated.mesh.abstract_mesh):
        return jax.jit(function).trace(*shapes).lower()


def compiled_kernels(study: Study) -> dict[str, Kernel]:
    """By name."""
    _, kernels = compile_with_sass(lower(study))
    return {kernel.name: kernel for kernel in kernels}


def _config(study: Study) -> Any:
    case = study.case
    assert case is not None
    shape = tuning.KernelShape(case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim_v, case.page_size, case.kv_dtype)
    kind = H200.kind
    makers = {"decode": tuning.decode_config, "extend": tuning.extend_config}
    return makers[study.op](kind, shape) if study.op in makers else gpu_mla.MlaConfig()


def _attention(study: Study) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    case = study.case
    assert case is not None

    def call(inputs: Any) -> jax.Array:
        runnable = MAKERS[study.op](case, inputs, _config(study), None)
        result: jax.Array = runnable.call(jnp.int32(0), runnable.carry, runnable.operands)
        return result

    return call, (jax.eval_shape(lambda: make_inputs(case, 1)),)


def _write(study: Study) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shape, tokens, head_dim = jax.ShapeDtypeStruct, 256, write.HEAD_DIM
    kv_dtype, heads = jnp.dtype(study.kv_dtype), write.NUM_KV_HEADS
    angles = shape((tokens, head_dim // 2), jnp.float32)
    scales = shape((tokens, heads, 2, write.PAGE_SIZE), jnp.float32) if study.kv_dtype != "bfloat16" else None
    return gpu_write.rope_and_write, (
        shape((tokens, heads, write.GROUP + 2, head_dim), jnp.bfloat16), Rotary(angles, angles),
        shape((tokens, heads, write.PAGE_SIZE, 2 * head_dim), kv_dtype), scales,
        shape((tokens,), jnp.int32), shape((tokens,), jnp.int32), shape((), jnp.int32),
    )  # fmt: skip


def _copies(study: Study) -> int | None:
    """That a producer starts per tile: keys and values of each page, and their scales. None where it copies something else."""
    if study.case is None or study.op == "mla decode":
        return None
    pages = max(1, _config(study).block_kv // study.case.page_size)
    return pages * (4 if study.case.is_quantized else 2)


def loop_row(role: Role) -> dict[str, Any]:
    steady = role.steady
    return {
        "role": role.name,
        "code": role.code_instructions,
        "instructions": steady.instructions,
        "stall": steady.stall_cycles,
        "products": len(steady.products),
        "copies": steady.count("UTMALDG"),
        "block_barriers": steady.count("BAR"),
        "spills": steady.spills,
        "exponentials": steady.count("MUFU"),
        "conversions": steady.count(*CONVERSIONS),
        "smem_bytes": steady.smem_bytes,
        "tensor": steady.tensor_cycles,
        "mix": steady.mix,
        "path": events(role.path),
    }


def tile_row(study: Study, found: list[Role]) -> dict[str, Any] | None:
    """Cycles of a multiprocessor per tile, the prediction, and what sets it; None for kernels without products."""
    case = study.case
    consumers = [role for role in found if role.name == "consumer"]
    if not consumers or case is None:
        return None
    config, consumer = _config(study), consumers[0]
    block_kv = TILE if study.op == "mla decode" else config.block_kv
    warpgroups = {"decode": lambda: config.streams, "extend": lambda: config.consumers}.get(study.op, lambda: 2)()
    rows = 64 * (warpgroups if study.op == "extend" else 1)
    turns = rows * block_kv * (case.head_dim + case.head_dim_v) / sum(x.macs for x in consumer.steady.products)
    producers = [role for role in found if role.name == "producer"][:1]
    stored = block_kv * (case.row_dim * jnp.dtype(case.kv_dtype).itemsize + (8 if case.is_quantized else 0))
    side = [(consumer.steady, turns), *((role.steady, 1.0) for role in producers)]

    def total(amount: Callable[[Any], float]) -> float:
        return sum(amount(steady) * count for steady, count in side)

    blocks = -(-case.num_heads * case.rows[0][0] // 64) if study.op == "mla decode" else 1  # that read a tile, from DRAM once
    memory = stored / blocks * NUM_SMS / READ_BYTES_PER_S * CLOCK_HZ
    cycles = {
        "memory": memory if study.op != "extend" else 0.0,  # there many queries share a tile, from the L2
        "issue": total(lambda x: x.instructions),
        "tensor": total(lambda x: x.tensor_cycles),
        "shared memory": (total(lambda x: x.smem_bytes) + stored) / SMEM_BYTES_PER_CYCLE,
        "special": total(lambda x: x.unit_cycles["special"]),
        "integer": total(lambda x: x.unit_cycles["integer"]),
        "consumer": cycles_alone(consumer.path) * turns / warpgroups,
    }
    bound = max(cycles, key=lambda name: cycles[name])
    softmax = consumer.steady.stall_cycles / consumer.steady.tensor_cycles
    return {
        "block_kv": block_kv,
        "cycles": cycles,
        "bound": bound,
        "softmax": softmax,
        **_predict(study, config, cycles[bound]),
    }


def _predict(study: Study, config: Any, tile_cycles: float) -> dict[str, float]:
    case = study.case
    assert case is not None
    tile_us = tile_cycles / CLOCK_HZ * 1e6
    if study.op == "extend":
        group = case.num_heads // case.num_kv_heads
        size = config.tile_tokens(group)
        blocks = [(kv_len - q_len + end) for q_len, kv_len in case.rows for end in range(size, q_len + size, size)]
        blocks_per_token_tile = case.num_heads // config.heads_per_tile(group)
        turns = sum(-(-end // config.block_kv) + LOST_TURNS for end in blocks) * blocks_per_token_tile
        us = max(turns / NUM_SMS * tile_us, case.flop / SUSTAINED_FLOPS_PER_S * 1e6)
        return {"us": us, "roofline_share": case.flop / H200.bf16_flops_per_s * 1e6 / us, "rate": case.flop / us / 1e6}
    block_kv, rows = (TILE, case.num_heads * case.rows[0][0] / 64) if study.op == "mla decode" else (config.block_kv, 1)
    tiles = sum(-(-kv_len // block_kv) for _, kv_len in case.rows) * case.num_kv_heads * max(rows, 1)
    us = FIXED_US + tiles / NUM_SMS * tile_us
    roofline_us = max(case.nbytes / H200.hbm_bytes_per_s, case.flop / H200.bf16_flops_per_s) * 1e6
    return {"us": us, "roofline_share": roofline_us / us, "rate": case.nbytes / us / 1e6}


def study(names: list[str]) -> Iterator[dict[str, Any]]:
    without_devices()
    compiled: dict[Any, dict[str, Kernel]] = {}
    for name in names:
        wanted = STUDIES[name]
        key = (wanted.op, wanted.case, wanted.kv_dtype)
        if key not in compiled:
            compiled[key] = compiled_kernels(wanted)
        kernel = compiled[key][wanted.kernel]
        found = roles(kernel, _copies(wanted))
        yield {
            "case": name,
            "compiler": kernel.compiler,
            "loops": [loop_row(role) for role in found],
            "tile": tile_row(wanted, found),
        }


_LOOP_COLUMNS = {
    "code": "code", "instructions": "instr", "stall": "stall", "products": "GMMA", "copies": "TMA", "block_barriers": "BAR",
    "spills": "spill", "exponentials": "MUFU", "conversions": "conv",
}  # fmt: skip


def _print_loops(rows: list[dict[str, Any]], *, paths: bool) -> None:
    print(f"{'case':26}{'loop':10}" + "".join(f"{title:>7}" for title in _LOOP_COLUMNS.values()) + "  most frequent")
    for row in rows:
        for loop in row["loops"]:
            mix = ", ".join(f"{name} {count}" for name, count in list(loop["mix"].items())[:6])
            print(f"{row['case']:26}{loop['role']:10}" + "".join(f"{loop[name]:7}" for name in _LOOP_COLUMNS) + f"  {mix}")
            if paths:
                print(f"    {loop['path']}")


def _print_tiles(rows: list[dict[str, Any]]) -> None:
    tiles = [(row["case"], row["tile"]) for row in rows if row["tile"]]
    if not tiles:
        return
    names = list(tiles[0][1]["cycles"])
    titles = "".join(f"{name.split()[0]:>10}" for name in names)
    print(f"\n{'case':26}{'keys':>5}{titles}{'softmax/tensor':>16}  {'slowest':14}{'us':>8}{'roofline':>9}{'T/s':>7}")
    for case, tile in tiles:
        cycles = "".join(f"{tile['cycles'][name]:10.0f}" for name in names)
        print(
            f"{case:26}{tile['block_kv']:5}{cycles}{tile['softmax']:16.2f}  {tile['bound']:14}{tile['us']:8.0f}"
            f"{tile['roofline_share']:9.0%}{tile['rate']:7.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--paths", action="store_true", help="the order of products, waits and barriers of each loop")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of tables")
    arguments = parser.parse_args()
    rows = list(study(arguments.cases))
    if arguments.json:
        json.dump(rows, sys.stdout)
        return
    print(f"JAX {jax.__version__}, ptxas {', '.join(sorted({row['compiler'] for row in rows}))}")
    _print_loops(rows, paths=arguments.paths)
    _print_tiles(rows)


if __name__ == "__main__":
    main()
