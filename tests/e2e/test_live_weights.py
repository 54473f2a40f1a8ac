"""A live server whose weights are replaced and whose memory is released, over HTTP and under load."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from live_server import DEPLOYMENTS, LiveServer, running
from safetensors.numpy import load_file, save_file

PROMPTS = [[3 + (seed * 31 + i * 7) % 290 for i in range(6 + 5 * seed)] for seed in range(6)]
NUM_TOKENS = 24
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of weights of one model, by the weight version that stands for them here."""
    return {"old": checkpoint("qwen3"), "new": make_checkpoint("qwen3", tmp_path_factory.mktemp("new"), seed=1)}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def server(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, compilation_cache: str
) -> Iterator[LiveServer]:
    options = ["--model-path", str(folders["old"]), "--weight-version", "old", "--max-running-requests", "4"]
    options += ["--chunked-prefill-size", "64", "--page-size", "16", "--max-total-tokens", "2048"]
    options += ["--decode-row-buckets", "4", "--compilation-cache-dir", compilation_cache]
    options += request.param.options
    with running(tmp_path_factory.mktemp("weights") / "server.log", *options, num_hosts=request.param.num_hosts) as live:
        yield live


def generate(server: LiveServer, prompt: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    reply: dict[str, Any] = server.generate(input_ids=prompt, sampling_params=sampling)
    return reply


def tokens_now(server: LiveServer) -> Tokens:
    return [generate(server, prompt)["output_ids"] for prompt in PROMPTS]


def update(server: LiveServer, folder: Path, **fields: Any) -> dict[str, Any]:
    reply = server.post("/update_weights_from_disk", {"model_path": str(folder), **fields})
    body: dict[str, Any] = reply.json()
    assert reply.status_code == (200 if body.get("success") else 400), reply.text
    return body


@pytest.fixture(scope="module")
def expected(server: LiveServer, folders: dict[str, Path]) -> dict[str, Tokens]:
    tokens = {"old": tokens_now(server)}
    assert update(server, folders["new"], weight_version="new")["success"]
    tokens["new"] = tokens_now(server)
    assert update(server, folders["old"], weight_version="old")["success"]
    assert tokens_now(server) == tokens["old"] != tokens["new"]
    return tokens


def test_model_info_says_what_is_served(server: LiveServer, folders: dict[str, Path], expected: dict[str, Tokens]) -> None:
    before = server.get("/model_info").json()
    assert (before["model_path"], before["weight_version"]) == (str(folders["old"]), "old")
    assert update(server, folders["new"], weight_version="new", load_format="safetensors")["success"]
    after = server.get("/model_info").json()
    changed = {"model_path": str(folders["new"]), "weight_version": "new", "load_format": "safetensors"}
    assert after == before | changed
    assert update(server, folders["old"], load_format=None)["success"]  # no version: the label stays
    assert server.get("/model_info").json() == before | {"weight_version": "new"}
    assert update(server, folders["old"], weight_version="old")["success"]


def test_another_version_of_the_same_weights(server: LiveServer, expected: dict[str, Tokens]) -> None:
    reply = server.post("/update_weight_version", {"new_version": "second", "abort_all_requests": False})
    assert reply.status_code == 200 and reply.json()["new_version"] == "second"
    assert server.get("/model_info").json()["weight_version"] == "second"
    answer = generate(server, PROMPTS[0])
    assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (expected["old"][0], "second")
    assert server.post("/update_weight_version", {"new_version": "old"}).json()["success"]


def test_under_load_every_request_has_its_tokens_from_one_set_of_weights(
    server: LiveServer, folders: dict[str, Path], expected: dict[str, Tokens]
) -> None:
    """More requests than can run, all the time; each says which weights computed it, and is right about it."""
    is_over = threading.Event()

    def ask(first: int) -> list[tuple[int, dict[str, Any]]]:
        replies = []
        for which in itertools.islice(itertools.cycle(range(len(PROMPTS))), first, None):
            replies.append((which, generate(server, PROMPTS[which])))
            if is_over.is_set():
                return replies
        raise AssertionError("a cycle has no end")

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask, first) for first in range(6)]
        try:
            for version in ("new", "old") * 4:
                assert update(server, folders[version], weight_version=version)["success"]
        finally:
            is_over.set()
        replies = [reply for one in asking for reply in one.result()]
    seen = {"old": 0, "new": 0}
    for which, reply in replies:
        version = reply["meta_info"]["weight_version"]
        assert reply["output_ids"] == expected[version][which]
        seen[version] += 1
    assert min(seen.values()) > 0, seen
    server.assert_whole()


def test_what_cannot_be_loaded_is_named_and_changes_nothing(
    server: LiveServer, folders: dict[str, Path], expected: dict[str, Tokens], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folders["new"], damaged)
    tensors: dict[str, np.ndarray] = load_file(damaged / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    save_file(tensors, damaged / "model.safetensors")
    for folder, says in (
        (damaged, "tensor model.layers.0.self_attn.o_proj.weight is missing"),
        (checkpoint("llama"), "holds another model: its architecture is 'LlamaForCausalLM'"),
        (Path("/nowhere"), "'/nowhere' is not a folder"),
    ):
        assert says in update(server, folder, weight_version="wrong", abort_all_requests=True)["message"]
    for fields, says in (
        ({"flush_cache": False}, "flush_cache must be true"),
        ({"keep_pause": True}, "keep_pause is not supported"),
        ({"token_step": 3}, "token_step is not supported; it must be absent or 0."),
        ({"load_format": "pickle"}, "got 'pickle'"),
        ({"spice": 1}, "spice"),
    ):
        assert says in json.dumps(update(server, folders["new"], **fields))
    assert tokens_now(server) == expected["old"]
    assert server.get("/model_info").json()["weight_version"] == "old"


def test_released_memory(server: LiveServer, folders: dict[str, Path], expected: dict[str, Tokens]) -> None:
    assert "No memory is released." in server.post("/resume_memory_occupation", {}).text
    assert "tags" in server.post("/release_memory_occupation", {"tags": ["hope"]}).text
    assert server.post("/release_memory_occupation", {}).json() == {"released": ["kv_cache", "weights"]}
    usage = server.internal_state()["runner"]["memory_usage"]
    assert (usage["weight_gb"], usage["kvcache_gb"]) == (0, 0)
    reply = server.post("/generate", {"input_ids": PROMPTS[0]})
    assert reply.status_code == 503 and "/resume_memory_occupation" in reply.text
    assert server.get("/ready").status_code == 503
    assert server.get("/health").status_code == server.get("/health_generate").status_code == 200
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).json() == {"released": ["weights"]}
    assert update(server, folders["new"], weight_version="new")["success"]
    assert server.get("/ready").status_code == 200
    assert tokens_now(server) == expected["new"]
    assert server.post("/release_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert server.post("/resume_memory_occupation", {}).json() == {"released": []}
    assert tokens_now(server) == expected["new"]
    assert update(server, folders["old"], weight_version="old")["success"]
    server.assert_whole()
