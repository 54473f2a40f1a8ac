"""Every kind of parallelism before a crowd of 64, new and from the cache, and before grammars: tokens are Transformers'."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from crowd import CROWD, check_crowd, check_grammars
from live_server import running
from parity import Oracle

OPTIONS = """
    --max-running-requests 32 --max-total-tokens 16384 --page-size 16 --chunked-prefill-size 32 --enable-mixed-chunk
    --speculative-algorithm NGRAM --speculative-num-draft-tokens 3 --decode-row-buckets 32 --prefill-token-buckets 512
""".split()  # noqa: SIM905
LAYOUTS = [
    ("llama", 1, "--dp-size 4"),
    ("llama", 1, "--dp-size 2 --tp-size 2"),
    ("llama", 1, "--tp-size 2 --attn-dp-size 2"),
    ("llama", 1, "--tp-size 4 --attn-dp-size 4"),
    ("llama", 2, "--tp-size 4 --attn-dp-size 2"),
    ("cohere2", 1, "--pp-size 4"),
    ("llama", 1, "--pp-size 2 --tp-size 2"),
    ("llama", 1, "--pp-size 2 --dp-size 2"),
    ("llama", 4, "--tp-size 4"),
    ("llama", 4, "--pp-size 2 --tp-size 2"),
    ("deepseek-v3", 1, "--tp-size 4 --dcp-size 2 --attn-dp-size 2"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("case", "hosts", "layout"), LAYOUTS, ids=lambda value: str(value).replace("--", ""))
def test_a_crowd(
    case: str, hosts: int, layout: str, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    model = checkpoint(case)
    oracle = Oracle(model)
    options = ["--model-path", str(model), "--compilation-cache-dir", compilation_cache, *OPTIONS, *layout.split()]
    with running(tmp_path / "log", *options, num_hosts=hosts) as server:
        for seed in (0, 0, 1):  # new, cached, new
            check_crowd(server, oracle, seed)

        def total(name: str) -> int:
            return sum(state[name] for state in server.get("/server_info").json()["internal_states"])

        assert total("cached_tokens") > 64 * CROWD, "the second crowd was cached"
        check_grammars(server, oracle)
        body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        before = total("num_aborted")
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as reply:
            next(reply.iter_raw())
        deadline_s = time.monotonic() + 20
        while total("num_aborted") == before:
            assert time.monotonic() < deadline_s, "who leaves is aborted"
            time.sleep(0.05)
        server.assert_whole()
