"""`jaxserve bench serving` against the real server: all kinds of prompts and APIs, and tokens as the server counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

from jaxserve.bench.record import read_records
from jaxserve.cli.main import run

SMALL = ["--num-prompts", "6", "--random-input-len", "24", "--random-output-len", "12", "--gsp-num-groups", "2",
         "--gsp-prompts-per-group", "3", "--gsp-system-prompt-len", "64", "--gsp-question-len", "8", "--gsp-output-len", "6",
         "--num-turns", "2", "--max-concurrency", "3", "--client-ceiling", "off", "--output-details"]  # fmt: skip


def bench(server: LiveServer, folder: Path, *options: str) -> dict[str, Any]:
    path = folder / "runs.jsonl"
    assert run(["bench", "serving", "--base-url", server.url, *SMALL, "--output-file", str(path), *options]) == 0
    *_, record = read_records(path)
    assert record["failed"] == 0, record["failures"]
    return record


@pytest.mark.parametrize(
    ("backend", "dataset"),
    [
        ("jaxserve", "random"),
        ("jaxserve", "multi-turn"),
        ("vllm", "generated-shared-prefix"),
        ("sglang-oai", "random-ids"),
        ("sglang-oai-chat", "json-schema"),
        ("vllm-chat", "multi-turn"),
    ],
)
def test_prompts_and_apis(backend: str, dataset: str, demo_server: LiveServer, tmp_path: Path) -> None:
    options = ["--backend", backend, "--dataset-name", dataset, "--flush-cache", "--cache-report"]
    record = bench(demo_server, tmp_path, *options)
    num_turns = 2 if dataset == "multi-turn" else 1
    assert record["completed"] == 6 * num_turns
    assert all(record["errors"][i] == "" and record["output_lens"][i] > 0 for i in range(6))
    if dataset != "json-schema":  # answers end when the JSON does
        assert record["total_output_tokens"] >= 6 * num_turns
    if dataset in ("generated-shared-prefix", "multi-turn") and backend == "jaxserve":
        assert record["cache_report"]["total_cached_tokens"] > 0
    assert 0 < record["mean_ttft_ms"] <= record["mean_e2e_latency_ms"]
    demo_server.wait_idle()


def test_tokens_are_those_that_the_server_counted(demo_server: LiveServer, tmp_path: Path) -> None:
    options = ["--random-range-ratio", "1", "--request-rate", "50", "--goodput", "e2el:60000"]
    record = bench(demo_server, tmp_path, *options)
    assert (record["input_lens"], record["output_lens"]) == ([24] * 6, [12] * 6)
    assert record["slo_attainment"] == 1.0
    assert all(len(gaps) <= 11 for gaps in record["itls"])
    for gaps, ttft_s, e2e_s in zip(record["itls"], record["ttfts"], record["e2e_latencies"], strict=True):
        assert ttft_s + sum(gaps) <= e2e_s + 1e-6
