"""Seconds that replacing the weights of a live server takes, and the memory of its scheduler after fifty times.

    python -m benchmarks.weight_update [--model-path FOLDER] [--updates 50] [--way folder] [-- any option of jaxserve serve]

--way requests: as tensors in requests, one for each layer, by RemoteEngine; fetched: by the server, from a WeightSender here.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import jax.numpy as jnp
import numpy as np
import psutil
from safetensors.numpy import load_file

from jaxserve import RemoteEngine, WeightSender
from jaxserve.bench.live_server import serve
from jaxserve.demo import demo_model_path

WARM_UP_UPDATES = 20  # while the allocators of the loading threads grow


def scheduler_mib() -> float:
    """What the scheduler of the only server that this process started holds in memory."""
    children = psutil.Process().children(recursive=True)
    (scheduler,) = [child for child in children if "jaxserve.server.scheduler_process" in " ".join(child.cmdline())]
    return float(scheduler.memory_info().rss / 2**20)


def by_layer(folder: str) -> list[list[tuple[str, np.ndarray]]]:
    tensors = load_file(f"{folder}/model.safetensors")
    layers = itertools.groupby(sorted(tensors), key=lambda name: name.split(".")[:3])
    return [[(name, tensors[name]) for name in names] for _, names in layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default=demo_model_path())
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--way", default="folder", choices=("folder", "requests", "fetched"))
    options, server_options = parser.parse_known_args()
    server_options = [option for option in server_options if option != "--"]
    with serve("--model-path", options.model_path, *server_options) as server:
        engine = RemoteEngine(f"http://127.0.0.1:{server.port}")
        layers = by_layer(options.model_path)
        arrays = {name: jnp.asarray(tensor) for layer in layers for name, tensor in layer}
        sender = WeightSender()

        def update_s() -> float:
            started_s = time.perf_counter()
            success, message = True, ""
            if options.way == "fetched":
                sender.send(engine, arrays)
            elif options.way == "requests":
                engine.begin_weight_update()
                for layer in layers:
                    engine.update_weights_from_tensor(layer)
                success, message = engine.end_weight_update()
            else:
                success, message, _ = engine.update_weights_from_disk(options.model_path)
            assert success, message
            return time.perf_counter() - started_s

        for _ in range(WARM_UP_UPDATES):
            update_s()
        before = scheduler_mib()
        seconds = [update_s() for _ in range(options.updates)]
        runner = server.state()["runner"]
        print(f"{runner['memory_usage']['weight_gb']:.3f} GB of weights, {options.updates} updates")
        print(f"seconds: median {statistics.median(seconds):.3f}, slowest {max(seconds):.3f}")
        print(f"memory of the scheduler, MiB: {before:.0f} before, {scheduler_mib():.0f} after")
        print(f"programs compiled: {runner['compiles_after_ready_total']}")


if __name__ == "__main__":
    main()
