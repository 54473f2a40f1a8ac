"""deploy/kubernetes/inference-gateway: an endpoint picker with these values reads from /metrics how busy a whole server is."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import yaml
from pipeline_harness import collect, request, running, until
from prometheus_client.parser import text_string_to_metric_families
from test_deploy import DEPLOY, PATHS, PORT, manifest
from test_multihost import made

from jaxserve.metrics import FAMILIES, PREFIX

VALUES = yaml.safe_load((DEPLOY / "kubernetes" / "inference-gateway" / "router.yaml").read_text())
CONFIG = yaml.safe_load(VALUES["router"]["epp"]["pluginsCustomConfig"][VALUES["router"]["epp"]["pluginsConfigFile"]])
PLUGINS: dict[str, dict[str, Any]] = {plugin["type"]: plugin.get("parameters", {}) for plugin in CONFIG["plugins"]}
ENGINE: dict[str, str] = PLUGINS["core-metrics-extractor"]["engineConfigs"][0]
SPECS = {field: spec for field, spec in ENGINE.items() if field.endswith("Spec")}


def picked(text: str, spec: str) -> float:
    """As llm-d's core-metrics-extractor reads a metric: of its series with the wanted labels (here none are wanted) the one
    with the newest time stamp, and without time stamps the first. Of gauges and counters only."""
    (family,) = [family for family in text_string_to_metric_families(text) if family.name == spec]
    assert family.type in ("gauge", "counter")
    assert all(sample.timestamp is None for sample in family.samples)
    return family.samples[0].value


def test_every_metric_exists_and_has_one_series() -> None:
    assert set(SPECS) == {
        "queuedRequestsSpec",
        "runningRequestsSpec",
        "kvUsageSpec",
        "cacheBlockSizeSpec",
        "cacheNumBlocksSpec",
    }
    assert PLUGINS["core-metrics-extractor"]["defaultEngine"] == ENGINE["name"]
    for field, spec in SPECS.items():
        assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", spec), "a name without labels"
        family = FAMILIES[spec.removeprefix(PREFIX)]
        assert family.kind == "gauge" and not family.labels
        assert family.source == "main" or field == "cacheBlockSizeSpec", "a worker's numbers are of one replica"


def test_the_picker_scrapes_and_sends_where_the_server_is() -> None:
    source = PLUGINS["metrics-data-source"]
    assert (source["scheme"], source["path"] in PATHS) == ("http", True)
    servers = VALUES["router"]["modelServers"]
    assert servers["targetPorts"] == [{"number": PORT}]
    assert servers["matchLabels"] == manifest("service")["spec"]["selector"]
    text = (DEPLOY / "kubernetes" / "inference-gateway" / "router.yaml").read_text()
    (several,) = re.findall(r"# matchLabels: (.*)", text)
    assert yaml.safe_load(several) == made("gpu")["Service"]["spec"]["selector"]
    assert {one["pluginRef"] for one in CONFIG["schedulingProfiles"][0]["plugins"]} <= PLUGINS.keys()


@pytest.mark.parametrize("dp_size", [1, 2])
async def test_the_picker_sees_the_whole_server(dp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    async with running(dp_size=dp_size, max_running_requests=2, load_balance_method="round_robin") as pipeline:
        params: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True}
        tasks = [asyncio.create_task(collect(pipeline, request([i + 1], **params))) for i in range(3 * dp_size)]
        await until(lambda: pipeline.manager.num_live == 3 * dp_size)
        await asyncio.sleep(0.2)
        text, content_type = await pipeline.manager.scrape("")  # the picker's client sends no Accept
        for task in tasks:
            task.cancel()
        await until(lambda: not pipeline.manager.num_live)
    assert content_type.startswith("text/plain; version=0.0.4")
    read = {field: picked(text.decode(), spec) for field, spec in SPECS.items()}
    assert (read["runningRequestsSpec"], read["queuedRequestsSpec"]) == (2 * dp_size, dp_size)
    assert 0 < read["kvUsageSpec"] < 1  # a share, not percent
    assert read["cacheBlockSizeSpec"] * read["cacheNumBlocksSpec"] > 0
