"""LoRA before real HTTP clients: eight adapters of PEFT at a time, each request with the tokens and logprobs of PEFT's model;
adapters that come and go under load, also in requests of their own.
"""

from __future__ import annotations

import base64
import concurrent.futures
import itertools
import json
import pickle
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import openai
import pytest
import torch
from crowd import CROWD, LEN, prompts
from live_server import LiveServer, running
from parity import NUM_TOP, TOKEN_IDS, Oracle, asked_of_prompt
from peft_adapters import load_adapted, make_adapter
from safetensors.numpy import load_file, save

from jaxserve import Engine, RemoteEngine
from jaxserve.server.requests import RequestError

OPTIONS = """
    --max-running-requests 32 --max-total-tokens 16384 --page-size 16 --chunked-prefill-size 32 --enable-mixed-chunk
    --decode-row-buckets 32 --prefill-token-buckets 512 --context-length 256 --warmup full
""".split()  # noqa: SIM905
ATTENTION, LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
# The fields of PEFT's LoraConfig of eight adapters: ranks and modules differ.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 16, "target_modules": ATTENTION + LINEAR},
    "attention": {"r": 8, "lora_alpha": 32, "target_modules": ATTENTION},
    "mlp": {"r": 4, "target_modules": LINEAR},
    "ends": {"r": 2, "lora_alpha": 16, "target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "rslora": {"r": 12, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "one layer": {"r": 8, "target_modules": ATTENTION + LINEAR, "layers_to_transform": [1]},
    "patterns": {"r": 4, "target_modules": ATTENTION, "rank_pattern": {"q_proj": 10}, "alpha_pattern": {"o_proj": 20}},
    "regex": {"r": 1, "lora_alpha": 30, "target_modules": r".*\.0\..*\.(k|gate|down)_proj"},
}
LAYOUTS = [
    ("", 1),
    ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 3", 1),
    ("--tp-size 4", 1),
    ("--dp-size 2", 1),
    ("--tp-size 2 --attn-dp-size 2", 1),
    ("--pp-size 2", 1),
    ("--tp-size 2", 2),
    ("--max-loras-per-batch 3 --max-loaded-loras 5", 1),  # fewer slots than adapters, and less room on the host
]
torch_lock = threading.Lock()  # of what the clients expect one is computed at a time
FEW = LAYOUTS[:1] + LAYOUTS[-1:]
OTHERS = [layout for layout in LAYOUTS if layout not in FEW]


class AdaptedOracle(Oracle):
    """PEFT and Transformers."""

    def __init__(self, model: Path, adapter: Path) -> None:
        super().__init__(model)
        self.model = load_adapted(model, adapter)


@pytest.fixture(scope="module")
def adapters(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, model = tmp_path_factory.mktemp("adapters"), checkpoint("llama")
    return {name: make_adapter(model, folder / name, seed=i, **config) for i, (name, config) in enumerate(ADAPTERS.items())}


@pytest.fixture(scope="module")
def oracles(checkpoint: Callable[[str], Path], adapters: dict[str, Path]) -> dict[str | None, Oracle]:
    """By adapter; None: the model as it is."""
    model = checkpoint("llama")
    return {None: Oracle(model)} | {name: AdaptedOracle(model, folder) for name, folder in adapters.items()}


def check_one(server: LiveServer, oracles: dict[str | None, Oracle], index: int, name: str | None, prompt: list[int]) -> None:
    asked = asked_of_prompt(index, prompt)
    params = {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}
    reply = server.generate(input_ids=prompt, sampling_params=params, lora_path=name, **asked)
    meta, oracle = reply["meta_info"], oracles[name]
    chosen = [value for value, *_ in meta["output_token_logprobs"]]
    best = [[value for value, *_ in row] for row in meta["output_top_logprobs"]]
    assert all(len(row) == NUM_TOP for row in best)
    with torch_lock:
        oracle.check(prompt, reply["output_ids"], chosen, best, LEN)
        of_ids = [[value for value, *_ in row] for row in meta["output_token_ids_logprobs"]]
        oracle.check_outputs(prompt, reply["output_ids"], of_ids)
        start = asked["logprob_start_len"]
        if start >= 0:
            told = [value for value, *_ in meta["input_token_logprobs"]][1:]
            expected = oracle.logprobs(prompt)[start:-1]
            np.testing.assert_allclose(told, expected[np.arange(len(told)), prompt[start + 1 :]], atol=1e-3)
            told_ids = [value for row in meta["input_token_ids_logprobs"][1:] for value, *_ in row]
            np.testing.assert_allclose(np.reshape(told_ids, (-1, len(TOKEN_IDS))), expected[:, TOKEN_IDS], atol=1e-3)


def check_crowd(server: LiveServer, oracles: dict[str | None, Oracle], seed: int) -> None:
    crowd, rng = prompts(oracles[None], seed), random.Random(seed)
    names = [rng.choice(list(oracles)) for _ in crowd]
    with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
        list(pool.map(check_one, itertools.repeat(server), itertools.repeat(oracles), range(CROWD), names, crowd))


def serve_and_check(
    layout: str, hosts: int, model: Path, adapters: dict[str, Path], oracles: Any, log: Path, cache: str
) -> None:
    paths = ",".join(f"{name}={folder}" for name, folder in adapters.items())
    options = ["--model-path", str(model), "--compilation-cache-dir", cache, "--lora-paths", paths, *OPTIONS, *layout.split()]
    with running(log, *options, num_hosts=hosts) as server:
        for seed in (0, 0, 1):  # new, cached, new
            check_crowd(server, oracles, seed)
        for state in server.get("/server_info").json()["internal_states"]:
            assert state["runner"]["compiles_after_ready_total"] == 0
        server.assert_whole()


@pytest.mark.parametrize(("layout", "hosts"), FEW, ids=lambda value: str(value).replace("--", ""))
def test_eight_adapters_before_a_crowd(
    layout: str, hosts: int, checkpoint: Any, adapters: dict[str, Path], oracles: Any, tmp_path: Path, compilation_cache: str
) -> None:
    serve_and_check(layout, hosts, checkpoint("llama"), adapters, oracles, tmp_path / "log", compilation_cache)


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "hosts"), OTHERS, ids=lambda value: str(value).replace("--", ""))
def test_eight_adapters_over_devices(
    layout: str, hosts: int, checkpoint: Any, adapters: dict[str, Path], oracles: Any, tmp_path: Path, compilation_cache: str
) -> None:
    serve_and_check(layout, hosts, checkpoint("llama"), adapters, oracles, tmp_path / "log", compilation_cache)


def come_and_go(server: LiveServer, adapters: dict[str, Path], oracles: dict[str | None, Oracle], seconds: float) -> int:
    """Adapters are loaded and unloaded in random order while clients ask for those that are loaded; each answer is its
    adapter's. A request for one that has just gone is refused, in a sentence. Returns how many were answered."""
    rng = random.Random(0)
    crowd = prompts(oracles[None], 5)
    expected = {name: greedy(oracle, crowd[0]) for name, oracle in oracles.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected), "adapters are recognizable"
    loaded: set[str] = set()
    ends_s = time.monotonic() + seconds
    answered = itertools.count()

    def ask(seed: int) -> None:
        choose = random.Random(seed)
        while time.monotonic() < ends_s:
            name = choose.choice([None, *loaded])
            body = {"input_ids": crowd[0], "sampling_params": {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}}
            reply = server.post("/generate", body | {"lora_path": name})
            if reply.status_code == 200:
                assert reply.json()["output_ids"] == expected[name], name
                next(answered)
            else:
                assert reply.status_code == 400 and str(name) in reply.text and name not in ("", None), reply.text

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(ask, seed) for seed in range(16)]
        while time.monotonic() < ends_s and not any(client.done() for client in clients):
            name = rng.choice(list(adapters))
            if name in loaded:
                loaded.discard(name)
                reply = server.post("/unload_lora_adapter", {"lora_name": name})
            else:
                reply = server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(adapters[name])})
                loaded.add(name)
            assert reply.status_code == 200 and reply.json()["success"], reply.text
            assert set(reply.json()["loaded_adapters"]) == loaded
            time.sleep(rng.random() / 5)
        for client in clients:
            client.result()
    for name in sorted(loaded):
        assert server.post("/unload_lora_adapter", {"lora_name": name}).json()["success"]
    return next(answered)


def greedy(oracle: Oracle, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(LEN):
        tokens.append(int(oracle.logprobs(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seconds", [10, pytest.param(180, marks=pytest.mark.matrix)])
def test_adapters_come_and_go_under_load(
    seconds: float, checkpoint: Any, adapters: dict[str, Path], oracles: Any, tmp_path: Path, compilation_cache: str
) -> None:
    options = ["--model-path", str(checkpoint("llama")), "--compilation-cache-dir", compilation_cache, *OPTIONS]
    lora = [
        "--enable-lora",
        "--max-loras-per-batch",
        "3",
        "--max-lora-rank",
        "16",
        "--lora-target-modules",
        "all,embed_tokens,lm_head",
    ]
    with running(tmp_path / "log", *options, *lora) as server:
        answered = come_and_go(server, adapters, oracles, seconds)
        assert answered > seconds, answered
        (state,) = server.get("/server_info").json()["internal_states"]
        assert state["runner"]["compiles_after_ready_total"] == 0
        assert server.get("/v1/models").json()["data"][0]["parent"] is None
        server.assert_whole()


def test_openai_clients_choose_by_model(
    checkpoint: Any, adapters: dict[str, Path], oracles: Any, tmp_path: Path, compilation_cache: str
) -> None:
    options = ["--model-path", str(checkpoint("llama")), "--compilation-cache-dir", compilation_cache, *OPTIONS]
    paths = f"all={adapters['all']},mlp={adapters['mlp']}"
    with running(tmp_path / "log", *options, "--served-model-name", "base", "--lora-paths", paths) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        assert {(model.id, model.parent) for model in client.models.list()} == {  # type: ignore[attr-defined]
            ("base", None),
            ("all", "base"),
            ("mlp", "base"),
        }
        prompt = prompts(oracles[None], 0)[3]
        for model, oracle in (("base", None), ("base:all", "all"), ("mlp", "mlp")):
            completion = client.completions.create(
                model=model, prompt=prompt, max_tokens=LEN, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
            )
            assert completion.model == model
            expected = oracles[oracle].logprobs(prompt + greedy(oracles[oracle], prompt))[len(prompt) - 1 : -1].amax(-1)
            np.testing.assert_allclose(completion.choices[0].logprobs.token_logprobs, expected, atol=1e-3)  # type: ignore[union-attr, arg-type]
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.completions.create(model="base:nobody", prompt=prompt, max_tokens=1)


def test_what_is_wrong_with_an_adapter_is_said_and_the_server_goes_on(
    checkpoint: Any, adapters: dict[str, Path], oracles: Any, tmp_path: Path, compilation_cache: str
) -> None:
    model = checkpoint("llama")
    cut = make_adapter(model, tmp_path / "cut", seed=0, r=2, target_modules=["q_proj"])
    whole = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    dora = make_adapter(model, tmp_path / "dora", seed=0, r=2, target_modules=["q_proj"], use_dora=True)
    large = make_adapter(model, tmp_path / "large", seed=0, r=32, target_modules=["q_proj"])
    other = make_adapter(checkpoint("qwen3-biases"), tmp_path / "other", seed=0, r=2, target_modules=["q_proj"])
    options = ["--model-path", str(model), "--compilation-cache-dir", compilation_cache, *OPTIONS]
    lora = ["--lora-paths", f"all={adapters['all']}", "--max-loras-per-batch", "2"]
    with running(tmp_path / "log", *options, *lora) as server:

        def said(route: str, **body: Any) -> str:
            reply = server.post(route, body)
            assert reply.status_code == 400, reply.text
            return str(reply.json()["message"])

        def load(name: str, path: Path, **more: Any) -> str:
            return said("/load_lora_adapter", lora_name=name, lora_path=str(path), **more)

        assert "is cut off or not a safetensors file" in load("x", cut)
        assert "DoRA is not supported" in load("x", dora)
        assert "rank 32" in load("x", large) and "--max-lora-rank is 16" in load("x", large)
        assert "is of another model" in load("x", other)
        assert "is not a folder" in load("x", tmp_path / "nowhere")
        assert "loaded already" in load("all", adapters["mlp"])
        assert "printable" in load(" ", adapters["mlp"])
        assert server.post(
            "/load_lora_adapter", {"lora_name": "mlp", "lora_path": str(adapters["mlp"]), "pinned": True}
        ).is_success
        assert "at most 1 may be" in load("attention", adapters["attention"], pinned=True)
        assert "is pinned" in said("/unload_lora_adapter", lora_name="mlp")
        assert "'x' is not loaded" in said("/unload_lora_adapter", lora_name="x")
        assert "'x' is not loaded; loaded are: 'all', 'mlp'" in said("/generate", text="a", lora_path="x")
        for index, name in enumerate((None, "all", "mlp")):
            check_one(server, oracles, index, name, prompts(oracles[None], 0)[index])
        server.assert_whole()


def given(folder: Path, **changed: Any) -> dict[str, Any]:
    """What /load_lora_adapter_from_tensors is sent of PEFT's files."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = (folder / "adapter_model.safetensors").read_bytes()
    body = {"config_dict": config, "serialized_tensors": tensors} | changed
    return body | {"serialized_tensors": base64.b64encode(body["serialized_tensors"]).decode()}


def as_tensors(folder: Path, kind: Callable[[Any], Any]) -> tuple[dict[str, Any], Any]:
    """What RemoteEngine and Engine are given of them: tensors and PEFT's own config."""
    from peft import LoraConfig

    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: kind(tensor) for name, tensor in tensors.items()}, LoraConfig.from_pretrained(str(folder))


def check_refusals(server: LiveServer, folder: Path, large: Path) -> None:
    """Of what is wrong with an adapter nothing is loaded, and nothing is left of it."""
    tensors, config = load_file(folder / "adapter_model.safetensors"), given(folder)["config_dict"]
    name = next(iter(tensors))
    renamed = {key.replace("mlp", "nothing"): tensor for key, tensor in tensors.items()}
    for changed, says in (
        ({"serialized_tensors": pickle.dumps(tensors)}, "serialized_tensors is a pickle"),
        ({"serialized_tensors": save(tensors)[:-1]}, "is cut off or not a safetensors file"),
        ({"serialized_tensors": b""}, "(0 bytes) is cut off or not a safetensors file"),
        ({"serialized_tensors": save(tensors | {name: tensors[name][:, :-1]})}, "is of another model"),
        ({"serialized_tensors": save(renamed)}, "it is not a module of the model"),
        ({"config_dict": {**config, "r": 3}}, "the scale depends on it"),
        ({"config_dict": {}}, "has rank 4, but adapter_config.json says 8"),
        ({"config_dict": {**config, "use_dora": True}}, "DoRA is not supported"),
        ({"load_format": "flattened_bucket"}, "got 'flattened_bucket'"),
        ({"added_tokens_config": {"<x>": 1}}, "added_tokens_config must be null"),
    ):
        reply = server.post("/load_lora_adapter_from_tensors", {"lora_name": "wrong", **given(folder, **changed)})
        assert reply.status_code == 400 and says in reply.json()["message"], reply.text
    assert (
        "--max-lora-rank is 16" in server.post("/load_lora_adapter_from_tensors", {"lora_name": "wrong", **given(large)}).text
    )
    assert "'wrong' is not loaded" in server.post("/generate", {"text": "a", "lora_path": "wrong"}).text


@pytest.mark.parametrize(
    ("layout", "num_replicas"),
    [
        ("", 1),
        pytest.param("--dp-size 2 --restart-workers --tokenizer-worker-num 3", 2, marks=pytest.mark.matrix),
    ],
)
def test_adapters_come_in_requests(
    layout: str,
    num_replicas: int,
    checkpoint: Any,
    adapters: dict[str, Path],
    oracles: Any,
    tmp_path: Path,
    compilation_cache: str,
) -> None:
    model, prompt = checkpoint("llama"), prompts(oracles[None], 0)[1]
    large = make_adapter(model, tmp_path / "large", seed=0, r=32, target_modules=["q_proj"])
    options = ["--model-path", str(model), "--compilation-cache-dir", compilation_cache, *OPTIONS, *layout.split()]
    lora = ["--enable-lora", "--max-lora-rank", "16", "--max-loras-per-batch", "2", "--max-loaded-loras", "2"]
    params = {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}
    with running(tmp_path / "log", *options, *lora) as server, RemoteEngine(server.url) as engine:

        def check(name: str, adapter: str) -> None:
            for rank in range(num_replicas):
                body = {"input_ids": prompt, "sampling_params": params, "lora_path": name, "data_parallel_rank": rank}
                reply = server.generate(**body)
                assert reply["output_ids"] == greedy(oracles[adapter], prompt), (name, adapter)

        body = {"lora_name": "policy/1", **given(adapters["mlp"])}
        assert server.post("/load_lora_adapter_from_tensors", body).json()["success"]
        assert server.post("/load_lora_adapter", {"lora_name": "mlp", "lora_path": str(adapters["mlp"])}).json()["success"]
        for name in ("policy/1", "mlp"):
            check(name, "mlp")
        reply = engine.load_lora_adapter_from_tensors("policy/2", *as_tensors(adapters["attention"], torch.tensor))
        assert list(reply.loaded_adapters) == ["policy/1", "mlp", "policy/2"]
        for _ in range(2):  # one more than there is room for: they are read again
            for name, adapter in (("policy/2", "attention"), ("mlp", "mlp"), ("policy/1", "mlp")):
                check(name, adapter)
        assert all(state["lora"]["num_reads"] > 6 for state in server.get("/server_info").json()["internal_states"])
        folders = {name: Path(folder) for name, folder in reply.loaded_adapters.items()}
        check_refusals(server, adapters["mlp"], large)
        assert {path.name for path in folders["policy/1"].parent.iterdir()} == {folders[f"policy/{n}"].name for n in (1, 2)}
        assert engine.unload_lora_adapter("policy/1").success
        assert not folders["policy/1"].exists() and folders["policy/2"].exists()
        assert engine.load_lora_adapter_from_tensors("policy/1", *as_tensors(adapters["all"], np.asarray)).success
        if num_replicas > 1:
            server.schedulers()[0].kill()
            for states in (["down", "up"], ["joining", "up"]), (["up", "up"],):
                wait_for(lambda states=states: server.get("/server_info").json()["replicas"] in states)
        for name, adapter in (("policy/1", "all"), ("policy/2", "attention"), ("mlp", "mlp")):
            check(name, adapter)
        server.assert_whole()
    assert not folders["policy/2"].parent.exists()


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("in_process", [False, True])
def test_an_engine_loads_and_unloads(
    in_process: bool, checkpoint: Any, adapters: dict[str, Path], oracles: Any, compilation_cache: str
) -> None:
    prompt = prompts(oracles[None], 0)[1]
    options: dict[str, Any] = {"max_running_requests": 4, "context_length": 256, "max_total_tokens": 2048}
    params = {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}
    with Engine(
        model_path=str(checkpoint("llama")),
        lora_paths={"all": str(adapters["all"])},
        in_process=in_process,
        compilation_cache_dir=compilation_cache,
        prefill_token_buckets=(64,),
        decode_row_buckets=(4,),
        **options,
    ) as engine:
        assert engine.load_lora_adapter(lora_name="mlp", lora_path=str(adapters["mlp"])).loaded_adapters.keys() == {
            "all",
            "mlp",
        }
        replies = engine.generate(input_ids=[prompt] * 3, sampling_params=params, lora_path=["mlp", None, "all"])
        assert isinstance(replies, list)
        for name, reply in zip(("mlp", None, "all"), replies, strict=True):
            assert reply["output_ids"] == greedy(oracles[name], prompt)
        assert engine.unload_lora_adapter(lora_name="mlp").success
        given_reply = engine.load_lora_adapter_from_tensors(
            "policy", *as_tensors(adapters["attention"], jnp.asarray), pinned=True
        )
        assert Path(given_reply.loaded_adapters["policy"]).is_dir()
        reply = engine.generate(input_ids=prompt, sampling_params=params, lora_path="policy")
        assert isinstance(reply, dict) and reply["output_ids"] == greedy(oracles["attention"], prompt)
        with pytest.raises(RequestError, match="'mlp' is not loaded"):
            engine.generate(input_ids=prompt, sampling_params=params, lora_path="mlp")
