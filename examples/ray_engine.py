"""Replicas on a Ray cluster: `python examples/ray_engine.py [--model MODEL] [--replicas 2] [--gpus 1 | --tpus 4]`.

Each replica is an actor with an Engine of its own, in a bundle of one placement group. The driver hands out chunks of prompts;
what a replica had that dies goes to the others. `--lose-one` ends one half-way, to see that.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxserve import Engine
from jaxserve.server.engine import EngineError

SAMPLING = {"temperature": 0, "max_new_tokens": 24}
CHUNK = 8  # prompts of one call
AHEAD = 2  # calls that a replica has at once, so that it never waits for the driver


@ray.remote(max_concurrency=AHEAD)
class Replica:
    def __init__(self, **options: Any) -> None:
        self._engine = Engine(**options)

    def generate(self, prompts: list[str]) -> list[dict[str, Any]]:
        return self._engine.generate(prompts, SAMPLING)


def start(options: argparse.Namespace) -> list[ActorHandle]:
    """A replica in each bundle. Ray shows it only its GPUs (CUDA_VISIBLE_DEVICES) or chips (TPU_VISIBLE_CHIPS)."""
    bundle = {"CPU": options.cpus, "GPU": options.gpus, "TPU": options.tpus}
    group = placement_group([{name: number for name, number in bundle.items() if number}] * options.replicas, strategy="SPREAD")
    if not group.wait(options.timeout):
        sys.exit(f"The cluster has no room for {options.replicas} replicas of {bundle}; it has {ray.cluster_resources()}.")
    return [
        Replica.options(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            resources={"TPU": options.tpus} if options.tpus else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(model_path=options.model, tp_size=options.gpus or options.tpus or 1)
        for index in range(options.replicas)
    ]


class Driver:
    """Shares prompts among replicas that may die."""

    def __init__(self, replicas: list[ActorHandle], prompts: list[str]) -> None:
        self._replicas = list(replicas)
        self._waiting = [prompts[i : i + CHUNK] for i in range(0, len(prompts), CHUNK)]
        self._running: dict[ray.ObjectRef, tuple[ActorHandle, list[str]]] = {}
        self.replies: dict[str, dict[str, Any]] = {}

    def step(self) -> bool:
        """Hands out what there is, and waits for one call to end. False when all prompts are answered."""
        for replica in self._replicas * AHEAD:
            if self._waiting and sum(r is replica for r, _ in self._running.values()) < AHEAD:
                prompts = self._waiting.pop()
                self._running[replica.generate.remote(prompts)] = (replica, prompts)
        if not self._running:
            return False
        (ended,), _ = ray.wait(list(self._running))
        replica, prompts = self._running.pop(ended)
        try:
            self.replies.update(zip(prompts, ray.get(ended), strict=True))
        except (RayActorError, EngineError) as error:  # the actor is gone, or its engine's processes are
            self._lose(replica, prompts, error)
        return True

    def _lose(self, replica: ActorHandle, prompts: list[str], error: Exception) -> None:
        self._waiting.append(prompts)
        if replica not in self._replicas:  # another of its calls has said so
            return
        self._replicas.remove(replica)
        print(f"A replica is lost, {len(self._replicas)} are left: {str(error).splitlines()[0]}", flush=True)
        if not self._replicas:
            sys.exit(f"No replica is left; {len(self.replies)} prompts were answered.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="A folder on all nodes, a name on the Hugging Face Hub, or demo.")
    parser.add_argument("--address", help="Of a running cluster, or auto; default: one of this machine, for this program.")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="Of each replica.")
    parser.add_argument("--gpus", type=int, default=0, help="Of each replica, over which the model is sharded.")
    parser.add_argument("--tpus", type=int, default=0, help="Of each replica: chips of one host.")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--timeout", type=float, default=60, help="Seconds that the cluster may take to find room.")
    parser.add_argument("--lose-one", action="store_true", help="Kill a replica when half of the prompts are answered.")
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False, logging_level="error")
    replicas = start(options)
    driver = Driver(replicas, [f"{i}, {i + 1}," for i in range(options.prompts)])
    try:
        ray.get([replica.__ray_ready__.remote() for replica in replicas])
    except RayActorError as error:
        sys.exit(f"A replica could not start: {str(error).splitlines()[-1]}")
    started_s = time.perf_counter()
    while driver.step():
        if options.lose_one and len(driver.replies) >= options.prompts / 2:
            options.lose_one = False
            ray.kill(replicas[0])
    seconds = time.perf_counter() - started_s
    tokens = sum(reply["meta_info"]["completion_tokens"] for reply in driver.replies.values())
    print(f"{len(driver.replies)} prompts, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
