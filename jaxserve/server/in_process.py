"""An Engine in the process of a program that holds the devices, as training programs do: which of them it gets."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax

from jaxserve.config import ServerArgs
from jaxserve.handover import Handover
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.threads import between_threads, thread_commands

_SIZES = ("tp_size", "pp_size", "dp_size")
# What only workers with processes of their own can do.
_OF_PROCESSES = {"nnodes": 1, "restart_workers": False}


def make_pipeline(
    args: ServerArgs,
    handover: Handover,
    *,
    mesh: jax.sharding.Mesh | None,
    devices: Sequence[jax.Device] | None,
    tp_size_follows: bool,
) -> Pipeline:
    """On those devices, in their order, or the first there are. `tp_size_follows`: from how many they are; nobody chose it.
    ValueError for what cannot be."""
    for name, only in _OF_PROCESSES.items():
        if getattr(args, name) != only:
            raise ValueError(f"{name} must be {only} for an Engine in this process; got {getattr(args, name)}.")
    if mesh is not None and devices is not None:
        raise ValueError("Give either a mesh or devices, not both.")
    chosen = _chosen(args, mesh, devices)
    if chosen is None:
        chosen = _first(args)
    elif tp_size_follows:
        args = args.replace(tp_size=max(len(chosen) // (args.pp_size * args.dp_size), 1))
    needed = args.dp_size * args.num_devices
    if len(chosen) != needed:
        sizes = " and ".join(f"{name} {getattr(args, name)}" for name in _SIZES if getattr(args, name) > 1) or "tp_size 1"
        raise ValueError(f"{sizes} needs {needed} devices; {len(chosen)} were given.")
    return Pipeline(args, thread_commands(args, chosen, handover), open_channels=between_threads)


def _chosen(args: ServerArgs, mesh: jax.sharding.Mesh | None, devices: Sequence[jax.Device] | None) -> list[jax.Device] | None:
    """What the program named."""
    if mesh is not None:
        chosen = list(mesh.devices.flat)
    elif devices is not None:
        chosen = list(devices)
    else:
        return None
    if not chosen:
        raise ValueError("An Engine needs at least one device; none was given.")
    for device in chosen:
        if not isinstance(device, jax.Device):
            raise ValueError(f"devices must be jax.Device, as jax.devices() lists them; got {device!r}.")
        if device.process_index != jax.process_index():
            raise ValueError(f"{device} belongs to process {device.process_index}; this one is {jax.process_index()}.")
    twice = [device for device, count in collections.Counter(chosen).items() if count > 1]
    if twice:
        raise ValueError(f"Each device may be given once; {twice[0]} was given more often.")
    if args.device != "auto" and args.device != _option_of(chosen[0]):
        raise ValueError(f"device {args.device} was asked for; {chosen[0]} is none.")
    return chosen


def _first(args: ServerArgs) -> list[jax.Device]:
    found = jax.local_devices(backend=None if args.device == "auto" else args.device)
    return found[: args.dp_size * args.num_devices]


def _option_of(device: jax.Device) -> str:
    """What the option `device` calls its platform."""
    return {"gpu": "cuda"}.get(device.platform, device.platform)
