"""Which devices of this host each replica gets: environment variables that CUDA and libtpu read when a process starts them.

Pure, without JAX: the main process, which asks, must not hold a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxserve.config import ServerArgs

_CUDA_LIST = "CUDA_VISIBLE_DEVICES"
_TPU_LISTS = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")  # today's name and the one before it
# How the chips of one process lie, by their number. libtpu knows no others within a host; 8 are the whole host.
_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
_FIRST_TPU_PORT = 8476


def replica_environment(args: ServerArgs, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What the scheduler process of replica `rank` finds in its environment beside `environment`, so that JAX sees only its
    own devices there. {} for a single replica, and on CPU.

    Which accelerator `auto` finds is not known here, so variables of both are set: one ignores the other's. ValueError with a
    sentence if a list of devices in `environment` is too short, or if TPUs cannot be divided so.
    """
    if args.dp_size == 1:
        return {}
    named = environment.get("JAX_PLATFORMS", "") if args.device == "auto" else args.device
    found: dict[str, str] = {}
    if not named or "cuda" in named or "gpu" in named:
        found |= _cuda(args, rank, environment)
    if not named or "tpu" in named:
        found |= _tpu(args, rank, environment)
    return found


def _cuda(args: ServerArgs, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    listed = _entries(environment.get(_CUDA_LIST))
    if listed is not None and "-1" in listed:  # CUDA reads no further
        listed = listed[: listed.index("-1")]
    if listed == [] and args.device == "auto":  # no GPU is to be seen, as so often on purpose
        return {}
    return {_CUDA_LIST: _share(args, rank, _CUDA_LIST, listed, args.num_devices)}


def _tpu(args: ServerArgs, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    num_chips = -(-args.num_devices // _devices_per_chip(environment))  # a chip belongs to one process, with all its devices
    bounds = _CHIP_BOUNDS.get(num_chips)
    if bounds is None:
        if args.device != "tpu":  # `auto` may find GPUs, which are divided as one likes
            return {}
        raise ValueError(
            f"{_sizes(args)} with --dp-size {args.dp_size}: the chips of a TPU host are divided into parts of "
            f"{', '.join(map(str, _CHIP_BOUNDS))}."
        )
    name = next((name for name in _TPU_LISTS if name in environment), _TPU_LISTS[0])
    chips = _share(args, rank, name, _entries(environment.get(name)), num_chips, "chips")
    first = chips.partition(",")[0]
    port = str(_FIRST_TPU_PORT + (int(first) if first.isdigit() else rank))  # by chip: another server has the others
    return {
        **{listed: chips for listed in _TPU_LISTS if listed == _TPU_LISTS[0] or listed in environment},
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        # Each process is a whole of its own, whatever a host's metadata say of the slice that it belongs to.
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": port,
        "CLOUD_TPU_TASK_ID": "0",
        # Else a process with four chips is taken for one that has them all, and locks the others out.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _devices_per_chip(environment: Mapping[str, str]) -> int:
    """Where nothing says what the chips are: one, which at worst leaves half of each without work."""
    return 2 if environment.get("TPU_ACCELERATOR_TYPE", "").startswith("tpu7x") else 1


def _entries(listed: str | None) -> list[str] | None:
    return None if listed is None else [entry.strip() for entry in listed.split(",") if entry.strip()]


def _share(args: ServerArgs, rank: int, name: str, listed: Sequence[str] | None, size: int, unit: str = "devices") -> str:
    """`size` of those that are `listed`, in their order (they may be UUIDs), or of all."""
    needed = args.dp_size * size
    if listed is None:
        listed = [str(index) for index in range(needed)]
    if len(listed) < needed:
        raise ValueError(f"--dp-size {args.dp_size} with {_sizes(args)} needs {needed} {unit}; {name} names {len(listed)}.")
    return ",".join(listed[rank * size : (rank + 1) * size])


def _sizes(args: ServerArgs) -> str:
    """What says how many devices a replica has."""
    pipeline = f"--pp-size {args.pp_size} and " if args.pp_size > 1 else ""
    return f"{pipeline}--tp-size {args.tp_size}"
