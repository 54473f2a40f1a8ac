"""An Engine in the process of a program that holds the devices, as training programs do: which of them it gets."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxserve.config import ServerArgs
from jaxserve.executor.mesh import Sizes, check_given
from jaxserve.handover import Handover
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.threads import between_threads, thread_commands

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
    if mesh is None and devices is None:
        found = jax.local_devices(backend=None if args.device == "auto" else args.device)
        chosen = found[: args.dp_size * args.num_devices]
    else:
        chosen = [*mesh.devices.flat] if mesh is not None else [*(devices or ())]
        if tp_size_follows:
            args = args.replace(tp_size=max(len(chosen) // (args.pp_size * args.dp_size), 1))
    for device in chosen:
        if not isinstance(device, jax.Device):
            raise ValueError(f"devices must be of jax.Device, as jax.devices() lists them; got {device!r}.")
    check_given(chosen, Sizes(args.pp_size, args.tp_size, args.dp_size), args.device)
    return Pipeline(args, thread_commands(args, chosen, handover), open_channels=between_threads)
