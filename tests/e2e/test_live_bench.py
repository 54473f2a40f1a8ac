"""`jaxserve bench offline` with a real engine, and two of its runs compared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from live_server import environment

from jaxserve.bench.record import read_records


def test_offline_and_compare(checkpoint: Callable[[str], Path], compilation_cache: str, tmp_path: Path) -> None:
    """Options as in test_live_engine, whose programs are cached."""
    out = tmp_path / "offline.jsonl"
    command = [sys.executable, "-m", "jaxserve", "bench", "offline", str(checkpoint("qwen3")), "--num-prompts", "6",
               "--random-input-len", "24", "--random-output-len", "8", "--random-range-ratio", "1", "--output-file", str(out),
               "--runs", "2", "--max-running-requests", "4", "--max-total-tokens", "4096", "--chunked-prefill-size", "16",
               "--decode-row-buckets", "4", "--compilation-cache-dir", compilation_cache]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Successful requests:                     6") == 2
    first, second = read_records(out)
    for record in (first, second):
        assert (record["total_output_tokens"], record["cached_tokens"], record["failed"]) == (48, 0, 0)
        assert record["server_info"]["internal_states"][0]["runner"]["compiles_after_ready_total"] == 0
    compared = subprocess.run(
        [sys.executable, "-m", "jaxserve", "bench", "compare", str(out), str(out)], capture_output=True, text=True, check=True
    )
    assert "2 and 2 runs" in compared.stdout and "no difference seen" in compared.stdout
