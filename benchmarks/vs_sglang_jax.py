"""Benchmark (h): `serve_tiny` on jaxserve and on sglang-jax, side by side on this CPU.

    python -m benchmarks.vs_sglang_jax --python THEIR_ENV/bin/python [--clients 4] [--rounds 5]

THEIR_ENV is an environment with sglang-jax (`pip install ".[cpu]"` in its `python` folder, Python 3.12 or newer). Both servers
serve the same tiny Qwen3 with dummy weights in float32 and answer the same clients over HTTP; rounds alternate, so that a slow
moment of the machine hits both. Both compile for 16 running requests at most. Theirs polls while it is idle, which costs ours.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import tempfile
from collections.abc import Iterator

from benchmarks.serve_tiny import OUTPUT_LEN, PROMPT_LEN, one_round
from benchmarks.tiny_model import write_tiny_qwen3
from jaxserve.bench.live_server import Server, serve, serve_command

MOST_RUNNING, CHUNK, POOL_TOKENS = 16, 256, 16384
_SHARED = (
    "--load-format", "dummy", "--dtype", "float32", "--max-running-requests", str(MOST_RUNNING),
    "--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", str(CHUNK), "--page-size", "16",
)  # fmt: skip


@contextlib.contextmanager
def serve_sglang_jax(python: str, model: pathlib.Path) -> Iterator[Server]:
    """Its `native` attention is the one that runs on CPU."""
    command = [
        python, "-m", "sgl_jax.launch_server", "--model-path", str(model), "--device", "cpu", "--host", "127.0.0.1",
        "--attention-backend", "native", "--log-level", "error", *_SHARED,
    ]  # fmt: skip
    with serve_command(command, ready_path="/health_generate", env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}) as server:
        yield server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of an environment with sglang-jax")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=100, help="of ours in a round; theirs are a tenth")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    clients, requests = options.clients, options.requests // options.clients * options.clients
    fewer = max(requests // 10 // clients, 1) * clients
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_qwen3(pathlib.Path(folder) / "tiny-qwen3")
        with (
            serve("--model-path", str(model), *_SHARED) as ours,
            serve_sglang_jax(options.python, model) as theirs,
        ):
            one_round(ours, clients, requests, 0), one_round(theirs, clients, fewer, 0)
            pairs = []
            for i in range(1, options.rounds + 1):
                rates = [n * OUTPUT_LEN / one_round(server, clients, n, i) for server, n in ((ours, requests), (theirs, fewer))]
                print(f"round {i}: {rates[0]:.0f} and {rates[1]:.1f} output tok/s", flush=True)
                pairs.append(rates)
    ratios = [a / b for a, b in pairs]
    print(f"{clients} clients, {PROMPT_LEN} tokens in, {OUTPUT_LEN} out; jaxserve against sglang-jax")
    print(f"ratio: median {statistics.median(ratios):.1f}, lowest {min(ratios):.1f} of {options.rounds} rounds")


if __name__ == "__main__":
    main()
