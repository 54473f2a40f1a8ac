"""Weights that a trainer in another process puts into requests, of PyTorch, NumPy or JAX, or that a server fetches from it."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from live_server import DEPLOYMENTS, LiveServer, ending, launch, launch_hosts, wait_ready
from safetensors.numpy import load_file, save

from jaxserve import RemoteEngine, WeightSender
from jaxserve.server.requests import RequestError

PROMPTS = [[3 + (seed * 31 + i * 7) % 290 for i in range(6 + 5 * seed)] for seed in range(3)]
Tensors = dict[str, np.ndarray]
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of weights of one model."""
    return {"old": checkpoint("qwen3"), "new": make_checkpoint("qwen3", tmp_path_factory.mktemp("new"), seed=1)}


@pytest.fixture(scope="module")
def tensors(folders: dict[str, Path]) -> dict[str, Tensors]:
    return {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def server(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, compilation_cache: str
) -> Iterator[LiveServer]:
    options = ["--model-path", str(folders["old"]), "--weight-version", "old", "--max-running-requests", "4"]
    options += ["--chunked-prefill-size", "64", "--page-size", "16", "--max-total-tokens", "2048"]
    options += ["--decode-row-buckets", "4", "--compilation-cache-dir", compilation_cache, *request.param.options]
    log, num_hosts = tmp_path_factory.mktemp("weights") / "server.log", request.param.num_hosts
    with ending(launch_hosts(log, num_hosts, *options) if num_hosts > 1 else launch(log, *options)) as live:
        wait_ready(live)
        yield live
        assert live.stop() == 0, live.log.read_text()


@pytest.fixture(scope="module")
def expected(server: LiveServer, folders: dict[str, Path]) -> dict[str, Tokens]:
    tokens = {}
    for name in ("new", "old"):
        assert server.post("/update_weights_from_disk", {"model_path": str(folders[name])}).json()["success"]
        tokens[name] = tokens_now(server)
    return tokens


def tokens_now(server: LiveServer) -> Tokens:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    return [server.generate(input_ids=prompt, sampling_params=sampling)["output_ids"] for prompt in PROMPTS]


def version_of(server: LiveServer) -> str:
    return str(server.get("/model_info").json()["weight_version"])


def bring(server: LiveServer, *files: bytes, **fields: Any) -> dict[str, Any]:
    encoded = [base64.b64encode(data).decode() for data in files]
    reply = server.post("/update_weights_from_tensor", {"serialized_named_tensors": encoded, **fields})
    body: dict[str, Any] = reply.json()
    assert reply.status_code == (200 if body.get("success") else 400), reply.text
    return body


@pytest.fixture(autouse=True)
def takes_tensors(server: LiveServer, tensors: dict[str, Tensors]) -> None:
    if server.followers:
        assert "by update_weights_from_disk with --nnodes above 1" in json.dumps(bring(server, save(tensors["new"])))
        pytest.skip("hosts refuse it")


def test_whole_ones_in_a_request(server: LiveServer, tensors: dict[str, Tensors], expected: dict[str, Tokens]) -> None:
    for times in range(3):
        for name in ("new", "old"):
            assert bring(server, save(tensors[name]), weight_version=name)["is_replaced"]
            assert (tokens_now(server), version_of(server)) == (expected[name], name)
        if not times:
            compiles = server.internal_state()["runner"]["compiles_total"]
    assert server.internal_state()["runner"]["compiles_total"] == compiles


def test_layer_by_layer(server: LiveServer, tensors: dict[str, Tensors], expected: dict[str, Tokens]) -> None:
    kinds = itertools.cycle((torch.tensor, np.asarray, jnp.asarray))
    with RemoteEngine(server.url) as engine:
        assert engine.begin_weight_update()[0]
        for _, names in itertools.groupby(sorted(tensors["new"]), key=lambda name: name.split(".")[:3]):
            kind = next(kinds)
            layer = [(name, kind(tensors["new"][name])) for name in names]
            assert engine.update_weights_from_tensor(layer, weight_version="by layer")[0]
        assert (tokens_now(server), version_of(server)) == (expected["old"], "old")
        success, message = engine.end_weight_update()
        assert success, message
        assert (tokens_now(server), version_of(server)) == (expected["new"], "by layer")
        with pytest.raises(RequestError, match="No update of weights has begun"):
            engine.end_weight_update()
        with pytest.raises(ValueError, match=r"The tensor a is a list; it must be an array\."):
            engine.update_weights_from_tensor([("a", [1.0])])
        with pytest.raises(ValueError, match=r"The tensor a is given twice\."):
            engine.update_weights_from_tensor([("a", np.ones(1)), ("a", torch.ones(1))])
    assert bring(server, save(tensors["old"]), weight_version="old")["success"]


def test_what_is_refused_changes_nothing(server: LiveServer, tensors: dict[str, Tensors], expected: dict[str, Tokens]) -> None:
    new, norm = tensors["new"], {"model.norm.weight": tensors["new"]["model.norm.weight"]}
    short = {"model.norm.weight": np.ones(3, np.float32)}
    for files, fields, says in (
        ([save(short)], {}, "Wrong shapes: model.norm.weight is [3], but config.json asks for [64]."),
        ([save(norm | {"lm.norm": np.ones(3)})], {}, "The model has no tensors of these names: lm.norm."),
        ([save(new)[:-1]], {}, "bytes must be a whole safetensors file: "),
        ([save(new), save(norm)], {}, "The tensor model.norm.weight is given twice."),
        ([pickle.dumps([("model.norm.weight", np.ones(3))])], {}, "serialized_named_tensors[0] is a pickle"),
        ([], {}, "must hold at least one safetensors file"),
        ([save(new)], {"load_format": "flattened_bucket"}, "got 'flattened_bucket'"),
    ):
        assert says in json.dumps(bring(server, *files, **fields, weight_version="wrong", abort_all_requests=True))
    assert "selector must be" in server.post("/begin_weight_update", {"selector": "draft"}).text
    assert (tokens_now(server), version_of(server)) == (expected["old"], "old")


def test_fetched_from_the_trainer(server: LiveServer, tensors: dict[str, Tensors], expected: dict[str, Tokens]) -> None:
    """From arrays over several devices, in several parts."""
    sharding = NamedSharding(Mesh(jax.devices()[:4], ("fsdp",)), PartitionSpec("fsdp"))
    sender = WeightSender(bucket_bytes=100_000)
    with RemoteEngine(server.url) as engine:
        for times in range(2):
            for name in ("new", "old"):
                sender.send(engine, jax.device_put(tensors[name], sharding), weight_version=name)
                assert (tokens_now(server), version_of(server)) == (expected[name], name)
            if not times:
                compiles = server.internal_state()["runner"]["compiles_total"]
        assert server.internal_state()["runner"]["compiles_total"] == compiles

        named = {"head": jnp.zeros(3), "out": jnp.ones(64)}
        with pytest.raises(ValueError, match=r"The mapping does not know: head\."):
            sender.send(engine, named, {"out": "model.norm.weight"})
        with pytest.raises(RequestError, match=r"Wrong shapes: model\.norm\.weight is \[3\]"):
            sender.send(engine, named, {"head": "model.norm.weight", "out": None}, weight_version="wrong")
        named["out"].delete()
        with pytest.raises(ValueError, match=r"Deleted arrays, as donated ones are: out\."):
            sender.send(engine, named)
        assert (tokens_now(server), version_of(server)) == (expected["old"], "old")
        transposed = {"out": jnp.asarray(tensors["new"]["model.norm.weight"]) / 2, "head": jnp.ones(1)}
        sender.send(engine, transposed, {"out": ("model.norm.weight", lambda norm: 2 * norm), "head": None})
        sender.send(engine, {"model.norm.weight": tensors["old"]["model.norm.weight"]})
        assert tokens_now(server) == expected["old"]


def test_what_cannot_be_fetched_changes_nothing(server: LiveServer, expected: dict[str, Tokens]) -> None:
    whole = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "address": "127.0.0.1:9", "uuid": 1}
    for fields, says in (
        ({"timeout_s": 0.2}, "have not come within 0.2 s: nobody answers there"),
        ({"dtypes": []}, "must each have one entry for each tensor; got (1, 0, 1) entries."),
        ({"shapes": [[-1]]}, "shapes must hold no negative numbers."),
        ({"address": "nowhere"}, "address must be host:port of a transfer server; got 'nowhere'."),
        ({"uuid": -1}, "uuid must be in [0, "),
        ({"timeout_s": 0}, "timeout_s must be positive; got 0."),
    ):
        reply = server.post("/update_weights_from_distributed", {**whole, **fields})
        assert reply.status_code == 400 and says in json.dumps(reply.json()), reply.text
    assert (tokens_now(server), version_of(server)) == (expected["old"], "old")


def test_in_place_of_released_ones(server: LiveServer, tensors: dict[str, Tensors], expected: dict[str, Tokens]) -> None:
    assert server.post("/release_memory_occupation", {"tags": ["weights"]}).status_code == 200
    norm = {"model.norm.weight": tensors["new"]["model.norm.weight"]}
    assert "Missing tensors: " in bring(server, save(norm))["message"]
    assert bring(server, save(tensors["new"]))["success"]
    assert server.get("/ready").status_code == 200
    assert tokens_now(server) == expected["new"]
    assert bring(server, save(tensors["old"]))["success"]
