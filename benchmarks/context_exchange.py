"""What a layer of latent attention sends between devices that share latents by tokens, by the ways to bring queries and latents
together: read from HLO compiled for H200.

    .venv-aot/bin/python -m benchmarks.context_exchange [--devices 8]

Each device has some of the heads, and an equal part of the latents of each request (--dcp-size).

* queries: those of all heads come to every device, and what they find there goes back to the heads' device with its log sums.
  Our way for steps that decode and for rows of few queries.
* gather: latents come to every device, some pages at a time. Our way for prompts.
* ring: latents go round, each device hands on what it got, and attends in between.

Bytes are those that one device receives. A loop's body is counted as often as the loop runs.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.aot.targets import gpu_devices, without_devices
from jaxserve.kernels.context import ContextGroup

AXIS = "tensor"
LATENT_DIM, ROW_DIM, VALUE_DIM = 512, 576, 128  # of DeepSeek's models
PART_TOKENS = 64
MODELS = {"DeepSeek-V3": 128, "DeepSeek-V2-Lite": 16}  # heads
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-to-all|collective-permute)(?:-start)?\(")
_SHAPE = re.compile(r"(?:bf16|u16)\[([\d,]+)\]")


class Step(NamedTuple):
    name: str
    num_tokens: int
    context: int  # tokens whose latents are wanted, of all rows


STEPS = (
    Step("decode, 64 rows of 4096", 64, 64 * 4096),
    Step("decode, 8 rows of 131072", 8, 8 * 131072),
    Step("a prompt's first 8192 tokens", 8192, 8192),
    Step("8192 tokens behind 32768", 8192, 40960),
    Step("8192 tokens behind 122880", 8192, 131072),
)


def queries(group: ContextGroup, q: jax.Array, latents: jax.Array) -> jax.Array:
    found = group.all_heads(q)[..., :LATENT_DIM] + latents[0, 0, 0]  # in place of attention: of the same shape
    return group.merged(found, jnp.sum(found.astype(jnp.float32), axis=-1))


def gather(group: ContextGroup, q: jax.Array, latents: jax.Array) -> jax.Array:
    return q[..., :VALUE_DIM] + jnp.sum(group.whole_pages(latents), axis=(0, 1))[:VALUE_DIM]


def ring(group: ContextGroup, q: jax.Array, latents: jax.Array) -> jax.Array:
    neighbours = [(i, (i + 1) % group.size) for i in range(group.size)]
    out = q[..., :VALUE_DIM]
    for hop in range(group.size):
        out = out * (1 + jnp.sum(latents, axis=(0, 1))[:VALUE_DIM])  # the order matters, as in merging
        if hop < group.size - 1:
            latents = jax.lax.ppermute(latents, AXIS, neighbours)
    return out


WAYS = (queries, gather, ring)


def received_bytes(hlo: str, num_devices: int) -> tuple[float, list[str]]:
    """By one device, and the collectives."""
    total, names, others = 0.0, [], (num_devices - 1) / num_devices
    for made, name in _COLLECTIVE.findall(hlo):
        dims = _SHAPE.findall(made)[-1]  # of an asynchronous pair the result, behind the operand
        nbytes = 2 * math.prod(map(int, dims.split(",")))
        total += nbytes if name == "collective-permute" else others * nbytes
        names.append(name)
    return total, names


def compiled(way: Any, mesh: Mesh, step: Step, heads: int) -> str:
    group = ContextGroup(AXIS, mesh.size, mesh.size)
    by_heads, by_parts = PartitionSpec(None, AXIS), PartitionSpec(AXIS)

    def body(q: jax.Array, latents: jax.Array) -> jax.Array:
        return way(group, q, latents)  # type: ignore[no-any-return]

    divided = jax.shard_map(body, mesh=mesh, in_specs=(by_heads, by_parts), out_specs=by_heads, check_vma=False)
    pages = -(-step.context // PART_TOKENS)
    q = jax.ShapeDtypeStruct((step.num_tokens, heads, ROW_DIM), jnp.bfloat16, sharding=NamedSharding(mesh, by_heads))
    latents = jax.ShapeDtypeStruct((pages, PART_TOKENS, ROW_DIM), jnp.bfloat16, sharding=NamedSharding(mesh, by_parts))
    return jax.jit(divided).lower(q, latents).compile().as_text() or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    num_devices = parser.parse_args().devices
    without_devices()
    mesh = Mesh(np.asarray(gpu_devices("h200", num_devices)), (AXIS,))
    for name, heads in MODELS.items():
        print(f"{name}, {heads} heads over {num_devices} devices: MB that a device receives in one layer")
        print(f"    {'':30}{''.join(f'{way.__name__:>10}' for way in WAYS)}")
        for step in STEPS:
            found = [received_bytes(compiled(way, mesh, step, heads), num_devices) for way in WAYS]
            print(f"    {step.name:30}{''.join(f'{total / 1e6:10.1f}' for total, _ in found)}")
        print(f"    {', '.join(f'{way.__name__}: {_counted(names)}' for way, (_, names) in zip(WAYS, found, strict=True))}")


def _counted(names: list[str]) -> str:
    return " and ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


if __name__ == "__main__":
    main()
