"""What XLA makes of grouped and int8 matrix products on TPUs: compiled for chips that are not there, nothing is run.

    .venv-aot/bin/python -m benchmarks.tpu_matmul_hlo [v6e:1x1 tpu7x:1x1x1] [--dump DIR]

It needs libtpu (pip install 'jax[tpu]'), no TPU. Prints the table of benchmarks/results/tpu_matmul_hlo.md. "Must move" are
operands and result, each once. "Written out" are arrays of at least a layer's weights that the program makes and keeps in HBM.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.aot import targets

BF16, INT8, FP8, INT32 = jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.int32
LAYERS = 4  # of the cases in a scan


@dataclasses.dataclass(frozen=True)
class Probe:
    name: str
    function: Callable[..., jax.Array]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    needed_flop: int
    weight_shape: tuple[int, ...]  # of one layer


def grouped(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, weight, sizes)


def grouped_told(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    with set_xla_metadata(ragged_dot_tiling="512,4096,1024"):  # undocumented; the compiler writes down its own choice like this
        return grouped(x, weight, sizes)


def grouped_mixed(x: jax.Array, weight: jax.Array, scale: jax.Array, sizes: jax.Array) -> jax.Array:
    """Weights as they are stored. scale [E, N]: a row's expert is known from where it stands."""
    product = jax.lax.ragged_dot(x, weight, sizes, preferred_element_type=x.dtype)
    expert = jnp.sum(jnp.cumsum(sizes)[None, :] <= jnp.arange(x.shape[0])[:, None], axis=1)
    return product * scale[expert]


def grouped_converted(x: jax.Array, weight: jax.Array, scale: jax.Array, sizes: jax.Array) -> jax.Array:
    return grouped_mixed(x, weight.astype(x.dtype), scale, sizes)


def int8_weight(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    return (x @ weight.astype(x.dtype)) * scale


def int8_both(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows of x are quantized on the way."""
    x_scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1, keepdims=True) / 127
    rounded = jnp.round(x.astype(jnp.float32) / x_scale).astype(INT8)
    product = jnp.matmul(rounded, weight, preferred_element_type=INT32)
    return (product.astype(jnp.float32) * x_scale * scale.astype(jnp.float32)).astype(x.dtype)


def bf16_weight(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def in_scan(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """x through LAYERS layers, each of which maps it back to its own shape; arguments after x have a layer axis."""

    def step(x: jax.Array, *stacked: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, arguments: (layer(x, *arguments), None), x, stacked)[0]

    return step


def probes() -> Iterator[Probe]:
    for experts, k, n in ((8, 4096, 14336), (128, 2048, 768)):
        for rows in (64, 4096):
            x, weight, sizes = ((rows, k), BF16), (experts, k, n), ((experts,), INT32)
            flop, name = 2 * rows * k * n, f"{rows} rows, {experts} experts of {k} x {n}"
            yield Probe(f"ragged_dot, {name}", grouped, (x, (weight, BF16), sizes), flop, weight)
            stored = {dtype: (x, (weight, dtype), ((experts, n), BF16), sizes) for dtype in (INT8, FP8)}
            yield Probe(f"ragged_dot, int8 converted, {name}", grouped_converted, stored[INT8], flop, weight)
            yield Probe(f"ragged_dot, int8 as it is, {name}", grouped_mixed, stored[INT8], flop, weight)
            yield Probe(f"ragged_dot, float8_e4m3fn as it is, {name}", grouped_mixed, stored[FP8], flop, weight)
            if rows * k > 1 << 23:
                yield Probe(f"ragged_dot, told its tiles, {name}", grouped_told, (x, (weight, BF16), sizes), flop, weight)
    for rows in (16, 4096):
        (k, n), name = (4096, 14336), f"{rows} rows, 4096 x 14336"
        x, flop = ((rows, k), BF16), 2 * rows * k * n
        yield Probe(f"bf16, {name}", bf16_weight, (x, ((k, n), BF16)), flop, (k, n))
        for label, function in (("int8 weight", int8_weight), ("int8 x int8", int8_both)):
            yield Probe(f"{label}, {name}", function, (x, ((k, n), INT8), ((n,), BF16)), flop, (k, n))
    yield from scans()


def scans() -> Iterator[Probe]:
    """Square matrices, so that layers can follow each other."""
    for rows in (16, 1024):
        k, x = 4096, ((rows, 4096), BF16)
        arguments = (x, ((LAYERS, k, k), INT8), ((LAYERS, k), BF16))
        flop = 2 * LAYERS * rows * k * k
        yield Probe(f"scan of int8 weight, {rows} rows, 4096 x 4096", in_scan(int8_weight), arguments, flop, (k, k))
    for rows in (64, 1024):
        k, x, sizes = 2048, ((rows, 2048), BF16), ((LAYERS, 32), INT32)
        flop, name = 2 * LAYERS * rows * k * k, f"{rows} rows, 32 experts of 2048 x 2048"
        bf16 = (x, ((LAYERS, 32, k, k), BF16), sizes)
        yield Probe(f"scan of ragged_dot, {name}", in_scan(grouped), bf16, flop, (32, k, k))
        int8 = (x, ((LAYERS, 32, k, k), INT8), ((LAYERS, 32, k), BF16), sizes)
        yield Probe(f"scan of ragged_dot, int8 as it is, {name}", in_scan(grouped_mixed), int8, flop, (32, k, k))


def compile_for(topology: str, probe: Probe) -> jax.stages.Compiled:
    device = targets.parse_target(topology).devices()[0]
    mesh = Mesh(np.array([device]), ("tensor",))
    replicated = NamedSharding(mesh, PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=replicated) for shape, dtype in probe.shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(probe.function).trace(*arguments).lower().compile()


def written_out(hlo: str, probe: Probe) -> list[str]:
    """Results of at least one layer's weights that are in HBM (no memory space S(n)) and are not the program's arguments."""
    elements, found, fused = math.prod(probe.weight_shape), [], False
    for line in hlo.splitlines():
        if line.endswith("{"):  # a computation begins; those of fusions and their parts make no arrays of their own
            fused = not (line.startswith("ENTRY") or "wide." in line or "region" in line or "while" in line)
        made = re.match(r"\s+%?([\w.-]+) = (\w+)\[([\d,]+)\](\{[^ ]*) ([\w-]+)\(", line)
        if made is None or fused:
            continue
        name, dtype, shape, layout, op = made.groups()
        is_view = op in ("parameter", "bitcast", "get-tuple-element", "copy-done") and "S(" not in op
        if not is_view and "S(" not in layout and math.prod(map(int, shape.split(","))) >= elements:
            found.append(f"{dtype}[{shape}] by {op} {name}")
    return found


def products(hlo: str) -> str:
    """Mosaic kernels with their tiles (rows, k, n), and loops."""
    tilings = re.findall(r'ragged_dot_tiling="([\d,]+)"', hlo)
    kinds = [f"Mosaic kernel, tiles {tiling}" for tiling in dict.fromkeys(tilings)]
    operands = dict.fromkeys(f"product of {left} and {right}" for left, right in _operand_types(hlo))
    return "; ".join([*kinds, *operands, *(["loop over layers"] if " while(" in hlo else [])]) or "?"


def _operand_types(hlo: str) -> Iterator[tuple[str, str]]:
    types = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", hlo))
    for left, right in re.findall(r" (?:convolution|dot)\(%?([\w.-]+), %?([\w.-]+)\)", hlo):
        yield types.get(left, "?"), types.get(right, "?")


def row_of(topology: str, probe: Probe, compiled: jax.stages.Compiled) -> str:
    hlo, memory, cost = compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis()
    assert hlo is not None and memory is not None and cost is not None
    must_move = memory.argument_size_in_bytes + memory.output_size_in_bytes
    cells = [
        topology.split(":")[0],
        probe.name,
        products(hlo),
        "; ".join(written_out(hlo, probe)) or "nothing",
        f"{memory.temp_size_in_bytes / 1e6:.1f}",
        f"{cost.get('bytes accessed', 0) / 1e6:.0f} / {must_move / 1e6:.0f}",
        f"{cost.get('flops', 0) / 1e9:.1f} / {probe.needed_flop / 1e9:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=["v6e:1x1", "tpu7x:1x1x1"])
    parser.add_argument("--dump", type=Path, help="folder for the compiled HLO")
    arguments = parser.parse_args()
    targets.without_devices()
    print("| chip | probe | products | written out | temporaries, MB | MB accessed / must move | GFLOP / needed |")
    print("|---|---|---|---|--:|--:|--:|")
    for topology in arguments.topologies:
        for probe in probes():
            compiled = compile_for(topology, probe)
            print(row_of(topology, probe, compiled), flush=True)
            if arguments.dump:
                arguments.dump.mkdir(parents=True, exist_ok=True)
                name = re.sub(r"\W+", "_", f"{topology} {probe.name}")
                (arguments.dump / f"{name}.txt").write_text(compiled.as_text() or "")


if __name__ == "__main__":
    main()
