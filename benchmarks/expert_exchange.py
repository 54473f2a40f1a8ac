"""What a layer with experts sends between devices, by the ways to bring tokens to experts: read from HLO compiled for H200.

    .venv-aot/bin/python -m benchmarks.expert_exchange [--devices 8] [--tokens 8192]

* psum: every device has all tokens and adds what its experts make of them. Our way.
* exchange: a device sends a share of the tokens to their experts and takes back the answers, which are gathered.
* split: the same where tokens stay split between the blocks, so that attention's sum is only scattered.

And with attention by data parallelism, where each device has tokens of its own (an equal share of them) before and behind:

* gather: all tokens come to every device, the sums go back in parts. Our way.
* send: a device sends its tokens to their experts and takes back the answers. "once": if a token that has several experts on a
  device is sent there once, and its answers are added up there.

Bytes are those that one device sends. An all-reduce counts as a reduce-scatter and an all-gather. How many rows a ragged
all-to-all sends follows from the routing: counted is every choice that falls to another device, all experts alike.
"""

from __future__ import annotations

import argparse
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.aot.targets import gpu_devices, without_devices

MODELS = {  # hidden size, experts of a token
    "Mixtral-8x7B": (4096, 2),
    "gpt-oss-120b": (2880, 4),
    "Qwen3-235B": (4096, 8),
    "DeepSeek-V3": (7168, 8),
}
AXIS = "tensor"
_COLLECTIVE = re.compile(r"= (\w+)\[([\d,]+)\]\S* (all-reduce|reduce-scatter|all-gather|ragged-all-to-all)\(")


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def experts(x: jax.Array) -> jax.Array:
    """In place of what experts compute: it must only depend on the rows."""
    return jax.nn.silu(x)


def psum(partial: jax.Array, sizes: jax.Array, per_token: int) -> jax.Array:
    return jax.lax.psum(experts(norm(jax.lax.psum(partial, AXIS))), AXIS)


def exchanged(x: jax.Array, sizes: jax.Array, per_token: int) -> jax.Array:
    """x [tokens of this device, hidden] to their experts' devices and back; sizes [n, n]: rows of one device for another."""
    me, num_devices = jax.lax.axis_index(AXIS), sizes.shape[0]
    rows = jnp.repeat(x, per_token, axis=0)
    room = jnp.zeros((len(rows) * num_devices, x.shape[1]), x.dtype)

    def send(rows: jax.Array, room: jax.Array, sizes: jax.Array) -> jax.Array:
        starts = jnp.cumsum(sizes[me]) - sizes[me]
        places = (jnp.cumsum(sizes, axis=0) - sizes)[me]
        return jax.lax.ragged_all_to_all(rows, room, starts, sizes[me], places, sizes[:, me], axis_name=AXIS)

    answers = send(experts(send(rows, room, sizes)), jnp.zeros_like(rows), sizes.T)
    return jnp.sum(answers.reshape(len(x), per_token, -1), axis=1)


def exchange(partial: jax.Array, sizes: jax.Array, per_token: int) -> jax.Array:
    x, num_devices = norm(jax.lax.psum(partial, AXIS)), sizes.shape[0]
    share = len(x) // num_devices
    mine = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * share, share)
    return jax.lax.all_gather(exchanged(mine, sizes, per_token), AXIS, tiled=True)


def split(partial: jax.Array, sizes: jax.Array, per_token: int) -> jax.Array:
    x = norm(jax.lax.psum_scatter(partial, AXIS, tiled=True))
    return jax.lax.all_gather(exchanged(x, sizes, per_token), AXIS, tiled=True)


def gather(x: jax.Array, sizes: jax.Array, per_token: int) -> jax.Array:
    return jax.lax.psum_scatter(experts(jax.lax.all_gather(norm(x), AXIS, tiled=True)), AXIS, tiled=True)


def send(x: jax.Array, sizes: jax.Array, per_token: int) -> jax.Array:
    return exchanged(norm(x), sizes, per_token)


OF_ALL, OF_SHARES = (psum, exchange, split), (gather, send)


def sent_bytes(hlo: str, num_devices: int, sent_rows: float) -> tuple[float, list[str]]:
    """By one device, and the collectives."""
    total, names, others = 0.0, [], (num_devices - 1) / num_devices
    for dtype, shape, name in _COLLECTIVE.findall(hlo):
        dims = [int(size) for size in shape.split(",")]
        nbytes = int(np.prod(dims)) * jnp.dtype({"bf16": "bfloat16", "f32": "float32"}[dtype]).itemsize
        names.append(name)
        if name == "all-reduce":
            total += 2 * others * nbytes
        elif name == "all-gather":
            total += others * nbytes
        elif name == "reduce-scatter":
            total += others * num_devices * nbytes
        else:
            total += sent_rows * dims[-1] * 2
    return total, names


def compiled(way: Any, mesh: Mesh, num_tokens: int, hidden: int, per_token: int) -> str:
    num_devices = mesh.size
    body = jax.shard_map(
        functools.partial(way, per_token=per_token),
        mesh=mesh,
        in_specs=(PartitionSpec(AXIS), PartitionSpec()),
        out_specs=PartitionSpec() if way in OF_ALL else PartitionSpec(AXIS),
        check_vma=False,
    )
    tokens = num_devices * num_tokens if way in OF_ALL else num_tokens
    partial = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(AXIS)))
    sizes = jax.ShapeDtypeStruct((num_devices, num_devices), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return jax.jit(body).lower(partial, sizes).compile().as_text() or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    without_devices()
    n = args.devices
    mesh = Mesh(np.asarray(gpu_devices("h200", n)), (AXIS,))
    for name, (hidden, per_token) in MODELS.items():
        print(f"{name}, {args.tokens} tokens of {hidden}, {per_token} experts each, {n} devices")
        sent_rows = args.tokens / n * per_token * (n - 1) / n
        once = args.tokens / n * (n - 1) * (1 - (1 - 1 / n) ** per_token)  # devices that have one of a token's experts
        for way in (*OF_ALL, *OF_SHARES):
            total, names = sent_bytes(compiled(way, mesh, args.tokens, hidden, per_token), n, sent_rows)
            note = f" (once: {2 * once * hidden * 2 / 1e6:.1f} MB)" if way is send else ""
            print(f"    {way.__name__:10}{total / 1e6:8.1f} MB  {', '.join(names)}{note}")


if __name__ == "__main__":
    main()
