"""Health, descriptions, load, cache, aborts and the tokenizer endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import FakeService
from http_harness import app_client

from jaxserve.scheduler.control.abort_request import AbortRequest
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput, FlushCacheReqOutput
from jaxserve.scheduler.control.slow_down import SlowDownReqInput


@pytest.mark.parametrize(("status", "code"), [("starting", 503), ("ready", 200), ("draining", 503), ("failed", 503)])
async def test_health_follows_the_status(status: str, code: int) -> None:
    service = FakeService()
    service.status = status
    async with app_client(service) as client:
        for path in ("/health", "/ready", "/health_generate"):
            reply = await client.get(path)
            assert (reply.status_code, reply.text) == (code, f"{status}\n")
        assert (await client.get("/")).text == "jaxserve is running\n"
        assert (await client.head("/")).status_code == 200


async def test_health_generate_fails_without_a_sign_of_life() -> None:
    service = FakeService()
    service.healthy = False
    async with app_client(service) as client:
        assert (await client.get("/health_generate")).status_code == 503
        assert (await client.get("/health")).status_code == 200


async def test_model_info() -> None:
    service = FakeService()
    async with app_client(service, load_format="dummy") as client:
        info = (await client.get("/model_info")).json()
        assert (await client.get("/get_model_info")).json() == info
    assert info == {"load_format": "dummy", **service.model_info}


async def test_server_info_masks_secrets() -> None:
    headers = {"authorization": "Bearer hush"}
    async with app_client(FakeService(), api_key="hush", admin_api_key="hush2") as client:
        reply = await client.get("/server_info", headers=headers)
        assert (await client.get("/get_server_info", headers=headers)).status_code == 200
    info = reply.json()
    assert "hush" not in reply.text
    assert (info["api_key"], info["schedule_policy"], info["status"]) == ("***", "fcfs", "ready")
    assert info["internal_states"][0]["num_running_reqs"] == 2
    assert info["version"]
    assert info["page_size"] == 16  # was None: what it was resolved to is shown


async def test_loads() -> None:
    async with app_client(FakeService()) as client:
        report = (await client.get("/v1/loads?include=core&dp_rank=0")).json()
        wrong = [await client.get(f"/v1/loads?{query}") for query in ("include=spice", "dp_rank=1", "dp_rank=x")]
    assert report["loads"] == [
        {
            "dp_rank": 0,
            "num_running_reqs": 2,
            "num_waiting_reqs": 1,
            "max_total_num_tokens": 64,
            "token_usage": 0.5,
            "num_live_sequences": 0,
        }
    ]
    assert [reply.status_code for reply in wrong] == [400] * 3
    assert "spice" in wrong[0].json()["message"]


async def test_flush_cache() -> None:
    service = FakeService()
    async with app_client(service) as client:
        assert (await client.post("/flush_cache")).text == "Cache flushed.\n"
        assert (await client.get("/flush_cache?timeout=2.5")).status_code == 200
        service.control_replies["flush_cache"] = [FlushCacheReqOutput(success=False, message="2 requests are running.")]
        refused = await client.post("/flush_cache")
        bad = await client.post("/flush_cache?timeout=-1")
        unknown = await client.post("/flush_cache?spice=1")
    assert service.controls == [FlushCacheReqInput(timeout_s=seconds) for seconds in (0.0, 2.5, 0.0)]
    assert (refused.status_code, refused.text) == (400, "2 requests are running.\n")
    assert bad.status_code == 400
    assert "timeout" in bad.json()["error"]["message"]
    assert "spice" in unknown.json()["error"]["message"]


async def test_abort_request() -> None:
    service = FakeService()
    async with app_client(service) as client:
        for body in ({"rid": "r"}, {"abort_all": True}, {"rid": "", "abort_all": True}):
            assert (await client.post("/abort_request", json=body)).status_code == 200
        for body in ({}, {"rid": ""}, {"abort_all": False}):
            assert (await client.post("/abort_request", json=body)).status_code == 400
        assert (await client.post("/abort_request", json={"rid": 5})).status_code == 400
    assert service.controls[:2] == [AbortRequest(rid="r"), AbortRequest(abort_all=True)]


async def test_pause_and_continue() -> None:
    service = FakeService()
    async with app_client(service) as client:
        for body in ({}, {"mode": "retract"}, {"mode": "in_place"}):
            reply = await client.post("/pause_generation", json=body)
            assert reply.json() == {"message": "Generation paused successfully.", "status": "ok"}
        assert (await client.post("/pause_generation")).status_code == 200  # no body at all
        bad = await client.post("/pause_generation", json={"mode": "now"})
        service.is_paused = True
        assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 503]
        reply = await client.post("/continue_generation", json={"torch_empty_cache": True})
        assert reply.json() == {"message": "Generation continued successfully.", "status": "ok"}
    assert [request.mode for request in service.controls[:4]] == ["abort", "retract", "in_place", "abort"]  # type: ignore[attr-defined]
    assert bad.status_code == 400
    assert "mode" in bad.json()["error"]["message"]


async def test_the_other_control_endpoints() -> None:
    service = FakeService()
    async with app_client(service) as client:
        for call in (client.get, client.post):
            assert (await call("/freeze_gc")).text == "Garbage collection frozen.\n"
        assert (await client.post("/slow_down", json={"forward_sleep_time": 0.5})).json() == {"forward_sleep_time": 0.5}
        for call in (client.post, client.put):
            reply = await call("/set_internal_state", json={"server_args": {"max_queued_requests": 5}})
            assert reply.json() == [True]
        assert (await client.post("/set_internal_state", json={})).status_code == 400
    assert SlowDownReqInput(forward_sleep_time=0.5) in service.controls


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize(prefix: str) -> None:
    async def post(path: str, **body: Any) -> Any:
        reply = await client.post(prefix + path, json=body)
        return reply.json() if reply.status_code == 200 else (reply.status_code, reply.json()["error"]["message"])

    async with app_client(FakeService()) as client:
        assert await post("/tokenize", prompt="ab") == {"tokens": [1, 97, 98], "count": 3, "max_model_len": 100}
        assert (await post("/tokenize", prompt="ab", add_special_tokens=False))["tokens"] == [97, 98]
        assert (await post("/tokenize", prompt=["a", ""]))["count"] == [2, 1]
        assert await post("/detokenize", tokens=[1, 97, 98]) == {"text": "ab"}
        assert await post("/detokenize", tokens=[1, 97], skip_special_tokens=False) == {"text": "<s>a"}
        assert await post("/detokenize", tokens=[[97], []]) == {"text": ["a", ""]}
        assert await post("/detokenize", tokens=[]) == {"text": ""}
        assert await post("/detokenize", tokens=[1000]) == (400, "tokens must be token ids in [0, 1000), got 1000.")
        assert await post("/detokenize", tokens=[-1]) == (400, "tokens must be token ids in [0, 1000), got -1.")
        assert (await post("/detokenize", tokens=[1, [2]]))[0] == 400
        assert await post("/tokenize", prompt=5) == (400, "prompt must be a string or a list, got 5.")


async def test_the_api_is_described() -> None:
    async with app_client(FakeService()) as client:
        schema = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 200
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert "messages" in described["required"]
    assert "temperature" in described["properties"]
    assert "/generate" in schema["paths"]
