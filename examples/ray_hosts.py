"""One model over several machines of a Ray cluster: `python examples/ray_hosts.py [--hosts 2] [--gpus 8 | --tpus 4]`.

An actor on each machine: the first holds the Engine, the others follow it, and they end together. `--pack` lets them share one.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxserve import Engine

SAMPLING = {"temperature": 0, "max_new_tokens": 24}


@ray.remote(max_concurrency=2)  # methods run beside the main thread, whose signals stay Ray's
class Host:
    def __init__(self, secret: str) -> None:
        os.environ["JAXSERVE_DIST_SECRET"] = secret

    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def lead(self, options: dict[str, Any]) -> None:
        self._engine = Engine(node_rank=0, **options)

    def follow(self, rank: int, options: dict[str, Any]) -> None:
        """Returns when host 0 has ended, and raises if a host was lost."""
        Engine.follow(node_rank=rank, **options)

    def generate(self, prompts: list[str]) -> list[dict[str, Any]]:
        return self._engine.generate(prompts, SAMPLING)

    def shutdown(self) -> None:
        self._engine.shutdown()


def start(options: argparse.Namespace) -> list[ActorHandle]:
    bundle = {"CPU": 1, "GPU": options.gpus, "TPU": options.tpus}
    bundles = [{name: number for name, number in bundle.items() if number}] * options.hosts
    group = placement_group(bundles, strategy="PACK" if options.pack else "STRICT_SPREAD")
    if not group.wait(options.timeout):
        sys.exit(f"The cluster has no {options.hosts} machines with {bundles[0]}; it has {len(ray.nodes())} machines.")
    secret = secrets.token_hex()
    return [
        Host.options(
            num_cpus=1,
            num_gpus=options.gpus,
            resources={"TPU": options.tpus} if options.tpus else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote(secret)
        for rank in range(options.hosts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="A folder on all nodes, a name on the Hugging Face Hub, or demo.")
    parser.add_argument("--address", help="Of a running cluster, or auto; default: one of this machine, for this program.")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--pack", action="store_true", help="Hosts may be on one machine.")
    parser.add_argument("--gpus", type=int, default=0, help="Of each host.")
    parser.add_argument("--tpus", type=int, default=0, help="Of each host.")
    parser.add_argument("--port", type=int, default=30100, help="This and the two behind it are free on the first host.")
    parser.add_argument("--timeout", type=float, default=60, help="Seconds that the cluster may take to find room.")
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False, logging_level="error")
    first, *others = start(options)
    engine_options = {
        "model_path": options.model,
        "nnodes": options.hosts,
        "tp_size": options.hosts * (options.gpus or options.tpus or 1),
        "dist_init_addr": f"{ray.get(first.address.remote())}:{options.port}",
    }
    following = [host.follow.remote(rank, engine_options) for rank, host in enumerate(others, 1)]
    try:
        ray.get(first.lead.remote(engine_options))
        prompts = ["The capital of France is", "1, 2, 3,"]
        for prompt, reply in zip(prompts, ray.get(first.generate.remote(prompts)), strict=True):
            print(f"{prompt!r} -> {reply['text']!r}")
        ray.get(first.shutdown.remote())
        ray.get(following)
    except RayError as error:
        sys.exit(str(error).splitlines()[-1])
    print(f"{options.hosts} hosts answered and have ended")


if __name__ == "__main__":
    main()
