"""Prometheus itself scrapes a loaded server, and every expression of the board and the alerts evaluates on what it has."""

from __future__ import annotations

import json
import math
import pathlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml
from live_server import LiveServer, free_port

from jaxserve.metrics import FAMILIES, PREFIX

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
WINDOW = "2m"
# Numbers of what the demo server does not do are 0 by 0, which is NaN.
MAY_BE_NAN = ("spec_", "step_tokens", "step_seconds", "grammar_compilation", "per_stage", 'mode="prefill_cache"')


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **params: str) -> Any:
        reply = httpx.get(f"{self._url}/api/v1/{path}", params=params, timeout=10).json()
        assert reply["status"] == "success", f"{params}: {reply}"
        return reply["data"]

    def values(self, expression: str) -> list[float]:
        return [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]


@pytest.fixture(scope="module")
def prometheus(demo_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program, "prometheus is missing: make debian-tools (Debian's package prometheus)"
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s", "scrape_timeout": "2s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [demo_server.url.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, cwd=folder)
    try:
        _wait_for(f"http://127.0.0.1:{port}/-/ready", process, folder / "log")
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        _load(demo_server, lambda: has_seen_load(prometheus))
        yield prometheus
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url, timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"Prometheus is not ready:\n{log.read_text()}")


def has_seen_load(prometheus: Prometheus) -> bool:
    """Scrapes have met it at its beginning and later."""
    names = ("num_requests_total", "num_grammar_total", "inter_token_latency_seconds_count", "num_steps_total")
    return all(sum(prometheus.values(f"rate({PREFIX}{name}[{WINDOW}])")) > 0 for name in names)


def _load(server: LiveServer, is_enough: Callable[[], bool]) -> None:
    """Streams, whole replies, a grammar, a shared prefix and refusals."""
    prefix = "The same words stand before every question of this kind. " * 4

    def one(i: int) -> None:
        params: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        if i % 3 == 0:
            assert list(server.stream("/generate", {"text": f"{prefix}{i}", "sampling_params": params}))
        elif i % 3 == 1:
            server.generate(text=f"{prefix}{i}", sampling_params=params)
        else:
            server.generate(text="A number:", sampling_params={"max_new_tokens": 8, "regex": f"[0-9]{{{i % 2 + 1}}}"})
        assert server.post("/generate", {"text": 3}).status_code == 400

    deadline_s, i = time.monotonic() + 90, 0
    with ThreadPoolExecutor(4) as pool:
        while i < 16 or not is_enough():
            assert time.monotonic() < deadline_s, "Prometheus has not seen the load"
            list(pool.map(one, range(i, i + 8)))
            i += 8


def board_expressions() -> list[tuple[str, str]]:
    board = json.loads((DEPLOY / "grafana" / "jaxserve.json").read_text())
    found = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", [])]
    filled = {"$__rate_interval": WINDOW, "$model": ".*", "$instance": ".*"}
    return [(title, re.sub(r"\$\w+", lambda match: filled[match[0]], expression)) for title, expression in found]


def test_every_family_arrives(prometheus: Prometheus) -> None:
    target = prometheus.get("targets")["activeTargets"][0]
    assert target["health"] == "up", target["lastError"]
    names = set(prometheus.get("label/__name__/values"))
    expected = {PREFIX + name + "_count" * (family.kind == "histogram") for name, family in FAMILIES.items()}
    assert expected <= names, f"missing: {sorted(expected - names)}"
    kinds = {name: about[0]["type"] for name, about in prometheus.get("metadata").items()}
    assert kinds[f"{PREFIX}inter_token_latency_seconds"] == "histogram"


def test_every_expression_of_the_board_has_data(prometheus: Prometheus) -> None:
    empty, wrong = [], []
    for title, expression in board_expressions():
        values = prometheus.values(expression)
        if not values:
            empty.append(f"{title}: {expression}")
        elif all(map(math.isnan, values)) and not any(name in expression for name in MAY_BE_NAN):
            wrong.append(f"{title}: {expression}")
    assert not empty, "no data:\n" + "\n".join(empty)
    assert not wrong, "NaN:\n" + "\n".join(wrong)


def test_numbers_are_those_of_the_load(prometheus: Prometheus, demo_server: LiveServer) -> None:
    (tokens,) = prometheus.values(f'sum(increase({PREFIX}realtime_tokens_total{{mode="decode"}}[{WINDOW}]))')
    assert tokens > 50
    (hits,) = prometheus.values(f'sum({PREFIX}realtime_tokens_total{{mode="prefill_cache"}})')
    assert hits > 100
    (refused,) = prometheus.values(f'sum({PREFIX}http_responses_total{{endpoint="/generate",status_code="400"}})')
    assert refused >= 8
    (grammars,) = prometheus.values(f"sum({PREFIX}num_grammar_total)")
    assert grammars >= 2
    (room,) = prometheus.values(f"sum({PREFIX}max_total_num_tokens)")
    assert room == demo_server.internal_state()["max_total_num_tokens"]
    (weights,) = prometheus.values(f"sum({PREFIX}weight_memory_usage_gb)")
    assert 0 < weights < 1


def test_the_alerts_evaluate_and_none_fires(prometheus: Prometheus) -> None:
    deadline_s = time.monotonic() + 10
    while True:
        rules = prometheus.get("rules")["groups"][0]["rules"]
        if all(rule["health"] != "unknown" for rule in rules) or time.monotonic() > deadline_s:
            break
        time.sleep(0.2)
    assert len(rules) == 11
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
