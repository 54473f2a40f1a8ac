"""What a capacity plan says beside its numbers: devices that stay idle, copies of the KV cache, slow attention."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.aot.fitting import stage_name
from jaxserve.aot.hand_over import are_neighbours
from jaxserve.aot.targets import Target
from jaxserve.executor.blueprint import Blueprint
from jaxserve.kernels.api import choose_backend, choose_latent_backend


def notes_of(blueprints: Sequence[Blueprint], target: Target) -> list[str]:
    blueprint, notes = blueprints[0], []
    args, config = blueprint.args, blueprint.config
    if target.chip.warning:
        notes.append(target.chip.warning)
    if args.num_devices < target.num_devices:
        notes.append(f"{target.num_devices - args.num_devices} of the {target.num_devices} devices stay idle.")
    notes += _stage_notes(blueprints, target)
    if target.num_hosts > 1:
        notes.append(f"{target.name} spans {target.num_hosts} hosts: `jaxserve serve` runs on each, with --nnodes.")
    devices = args.attn_tp_size
    if config.latent_dim is not None and devices > 1:
        notes.append(
            f"Each of the {devices} devices keeps the latents of all tokens: they hold no more tokens than one would beside "
            f"the same weights. With --attn-dp-size {args.tp_size} each keeps those of other requests."
        )
    elif devices > config.num_kv_heads:
        notes.append(
            f"Each of the {config.num_kv_heads} KV heads is kept on {devices // config.num_kv_heads} devices, which "
            f"hold no more tokens together than {config.num_kv_heads} would beside the same weights (--attn-dp-size)."
        )
    if blueprint.backend.name == "reference":
        try:
            choose = choose_backend if config.latent_dim is None else choose_latent_backend
            choose("pallas", blueprint.backend.spec)
        except NotImplementedError as error:
            notes.append(f"Attention runs without our kernels, which is slow: {error}")
    return notes


def _stage_notes(blueprints: Sequence[Blueprint], target: Target) -> list[str]:
    """Whether a torus has each stage of a pipeline in one piece."""
    if len(blueprints) == 1 or target.chip.platform != "tpu":
        return []
    apart = [
        stage_name(blueprint.config, number, len(blueprints))
        for number, blueprint in enumerate(blueprints)
        if not are_neighbours(target, list(blueprint.mesh.devices.flat))
    ]
    if not apart:
        return ["The devices of each stage are neighbours on the torus."]
    return [f"The devices of {', '.join(apart)} are no neighbours on the torus: what they add up crosses those of others."]
