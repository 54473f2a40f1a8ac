"""The server over HTTP: a small trained checkpoint, then Llama-3.1-8B's shapes with dummy weights. First that it answers
rightly in every mode, then how many tokens per second many clients get out of it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import http.client
import importlib.util
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.device.case import Case, Measure, NotHereError, Numbers, Setting
from benchmarks.device.checkpoint import widened_demo
from benchmarks.device.driver import COMPILED
from benchmarks.model_configs import LLAMA_8B
from benchmarks.tiny_model import write_tiny_qwen3
from jaxserve.bench.live_server import Server, serve

SAMPLING_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8, "sampling_seed": 1},
    "top k, p, min p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "sampling_seed": 1},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1, "sampling_seed": 1},
}
_START_LIMIT_S = 300.0
_NEEDED = ("fastapi", "httptools", "msgspec", "pydantic", "starlette", "uvicorn", "uvloop", "zmq")


@dataclasses.dataclass(frozen=True)
class Load:
    clients: int
    requests: int  # of each
    prompt_len: int
    output_len: int


@dataclasses.dataclass(frozen=True)
class Served:
    name: str
    options: tuple[str, ...]
    load: Load
    is_dummy: bool = False


def served(setting: Setting) -> list[Served]:
    if setting.smoke:
        rows = ("--max-running-requests", "4", "--decode-row-buckets", "4", "--prefill-token-buckets", "64")
        sizes = ("--context-length", "256", "--chunked-prefill-size", "64", "--max-total-tokens", "1024")
        return [Served("small checkpoint", ("--enable-mixed-chunk", *rows, *sizes), Load(2, 1, 8, 4))]
    rows = ("--max-running-requests", "64", "--decode-row-buckets", "8,64", "--attention-backend", "pallas")
    small = (*rows, "--prefill-token-buckets", "256,2048", "--chunked-prefill-size", "2048", "--context-length", "2048")
    large = (*rows, "--prefill-token-buckets", "2048", "--chunked-prefill-size", "2048", "--context-length", "4096")
    large = (*large, "--max-total-tokens", "262144", "--load-format", "dummy")
    load = Load(64, 4, 256, 128)
    return [
        Served("small checkpoint", (*small, "--enable-mixed-chunk", "--max-total-tokens", "131072"), load),
        Served("Llama-8B", large, Load(64, 2, 1024, 128), is_dummy=True),
        Served("small checkpoint, fp8 KV", (*small, "--kv-cache-dtype", "fp8_e4m3", "--max-total-tokens", "131072"), load),
    ]


@functools.cache
def _folder(is_dummy: bool) -> str:
    folder = Path(tempfile.mkdtemp()) / "model"
    if not is_dummy:
        return str(widened_demo(folder))
    write_tiny_qwen3(folder)  # for its tokenizer
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(folder)


class _Running:
    """At most one server, until another is asked for or this process ends."""

    def __init__(self) -> None:
        self._served: Served | None = None
        self._stack = contextlib.ExitStack()
        self._server: Server | None = None
        atexit.register(self._stack.close)

    def get(self, wanted: Served) -> Server:
        if self._served != wanted or self._server is None:
            self._stack.close()
            self._served, self._server = wanted, None
            command = ("--model-path", _folder(wanted.is_dummy), "--compilation-cache-dir", COMPILED, "--skip-server-warmup")
            self._server = self._stack.enter_context(serve(*command, *wanted.options))
        return self._server


@functools.cache
def _running() -> _Running:
    return _Running()


def start(wanted: Served) -> Server:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHereError(f"not installed: {', '.join(missing)}")
    return _running().get(wanted)


def _ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def check_answers(wanted: Served) -> Measure:
    """Each mode twice: the same tokens from the prompt and, the second time, from its cached prefix; logprobs and a stream."""
    server = start(wanted)

    def ask(prompt: list[int], **more: Any) -> Any:
        return server.post(server.connect(), "/generate", {"input_ids": prompt, **more})

    def measure() -> Numbers:
        problems, cached = [], 0
        for seed, (name, params) in enumerate(SAMPLING_MODES.items()):
            sampling = {**params, "max_new_tokens": wanted.load.output_len, "ignore_eos": True}
            prompt = _ids(8 * wanted.load.prompt_len, seed) if not wanted.is_dummy else _ids(wanted.load.prompt_len, seed)
            prompt = prompt[:200]
            first, second = (ask(prompt, sampling_params=sampling, return_logprob=name == "greedy") for _ in range(2))
            cached += second["meta_info"]["cached_tokens"]
            if first["output_ids"] != second["output_ids"]:
                problems.append(f"{name}: another answer from the cached prefix")
            if len(first["output_ids"]) != wanted.load.output_len:
                problems.append(f"{name}: {len(first['output_ids'])} tokens, asked for {wanted.load.output_len}")
            if name == "greedy" and streamed(server, prompt, sampling) != first["text"]:
                problems.append("the stream says something else")
        problems += [] if cached else ["no prefix was found in the cache"]
        failed = {"status": "failed", "reason": "; ".join(problems)} if problems else {}
        return {"ready_s": round(server.ready_s, 1), "cached_tokens": cached, **failed}

    return measure


def streamed(server: Server, prompt: list[int], sampling: dict[str, Any]) -> str:
    """The text of the last chunk, which is all of it."""
    *_, last = chunks(server, prompt, sampling)
    return str(last["text"])


def chunks(server: Server, prompt: list[int], sampling: dict[str, Any]) -> Any:
    connection = server.connect()
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"/generate answered {reply.status}: {reply.read().decode()[:200]}")
    for line in reply:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


def time_load(wanted: Served) -> Measure:
    """Output tokens per second of all clients together, and how long the first token takes."""
    server = start(wanted)
    load = wanted.load

    def client(seed: int, count: int, waits: list[float], errors: list[Exception]) -> None:
        try:
            for request in range(count):
                sampling = {"temperature": 0, "max_new_tokens": load.output_len, "ignore_eos": True}
                started_s = time.perf_counter()
                stream = chunks(server, _ids(load.prompt_len, 1000 * seed + request), sampling)
                next(stream)
                waits.append(time.perf_counter() - started_s)
                *_, _last = stream
        except (OSError, RuntimeError, ValueError, StopIteration, http.client.HTTPException) as error:
            errors.append(error)

    def round_(first_seed: int, count: int) -> tuple[float, list[float]]:
        waits: list[float] = []
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=client, args=(first_seed + one, count, waits, errors), daemon=True)
            for one in range(load.clients)
        ]
        started_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return time.perf_counter() - started_s, waits

    def measure() -> Numbers:
        round_(0, 1)
        took_s, waits = round_(load.clients, load.requests)
        tokens = load.clients * load.requests * load.output_len
        first_ms = {
            "first_token_ms": round(statistics.median(waits) * 1e3, 1),
            "first_token_ms_max": round(max(waits) * 1e3, 1),
        }
        compiles = server.state()["runner"]["compiles_after_ready_total"]
        numbers = {"us": round(took_s / load.requests / load.output_len * 1e6, 1), "tokens_per_s": round(tokens / took_s, 1)}
        return {**numbers, **first_ms, **dataclasses.asdict(load), "compiles_after_ready": compiles}

    return measure


def cases(setting: Setting) -> list[Case]:
    found = []
    for wanted in served(setting):
        if not wanted.is_dummy:
            check = functools.partial(check_answers, wanted)
            found.append(Case(f"server, {wanted.name}: answers", check, limit_s=60, prepare_limit_s=_START_LIMIT_S))
        load = functools.partial(time_load, wanted)
        found.append(Case(f"server, {wanted.name}: load", load, limit_s=90, prepare_limit_s=_START_LIMIT_S))
    return found
