"""Health, descriptions, load, cache, aborts and the tokenizer endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import FakeService
from http_harness import app_client

from jaxserve.scheduler.control.abort_request import AbortRequest
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput, FlushCacheReqOutput
from jaxserve.scheduler.control.slow_down import SlowDownReqInput

CORE_LOAD = {
    "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 32, "max_total_num_tokens": 64,
    "max_running_requests": 8, "token_usage": 0.5, "gen_throughput": 9.5, "cache_hit_rate": 0.25, "num_total_tokens": 39,
    "num_live_sequences": 0,
}  # fmt: skip


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
    assert info["max_total_num_tokens"] == info["internal_states"][0]["max_total_num_tokens"]
    assert info["version"]
    assert info["page_size"] == 16  # was None: what it was resolved to is shown
    assert info["kv_events"] is None


async def test_loads() -> None:
    async with app_client(FakeService()) as client:
        report = (await client.get("/v1/loads?include=core&dp_rank=0")).json()
        queries = ("include=spice", "dp_rank=1", "dp_rank=x", "format=prometheus", "inclde=core", "include=core,spice")
        wrong = [await client.get(f"/v1/loads?{query}") for query in queries]
    assert report["loads"] == [CORE_LOAD]
    assert [reply.status_code for reply in wrong] == [400] * 6
    assert "spice" in wrong[0].json()["message"]


async def test_loads_have_the_sections_that_routers_ask_for() -> None:
    service = FakeService()
    queues = {"waiting": 1, "grammar": 0, "paused": 0, "retracted": 1}
    async with app_client(service) as client:
        (of_smg,) = (await client.get("/v1/loads?include=core,disagg,queues,memory")).json()["loads"]
        (none_here,) = (await client.get("/v1/loads?include=spec,%20lora")).json()["loads"]
        state = service.control_replies["get_internal_state"][0].internal_state
        state.update(avg_spec_accept_length=2.5, spec_accept_rate=0.75)
        (whole,) = (await client.get("/v1/loads")).json()["loads"]
    assert of_smg == {**CORE_LOAD, "queues": queues}
    assert none_here == CORE_LOAD
    assert whole == {**CORE_LOAD, "queues": queues, "speculative": {"accept_length": 2.5, "accept_rate": 0.75}}


async def test_load_as_released_routers_ask_for_it() -> None:
    async with app_client(FakeService()) as client:
        reply = await client.get("/get_load")
    assert reply.json() == [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 39}]


async def test_flush_cache() -> None:
    service = FakeService()
    async with app_client(service) as client:
        assert (await client.post("/flush_cache")).text == "Cache flushed.\n"
        assert (await client.get("/flush_cache?timeout=2.5")).status_code == 200
        service.control_replies["flush_cache"] = [FlushCacheReqOutput(success=False, message="2 requests are running.")]
        refused = await client.post("/flush_cache")
        bad = await client.post("/flush_cache?timeout=-1")
        unknown = await client.post("/flush_cache?timeout=1&spice=1")
    assert service.controls == [FlushCacheReqInput(timeout_s=seconds) for seconds in (0.0, 2.5, 0.0)]
    assert (refused.status_code, refused.text) == (400, "2 requests are running.\n")
    assert bad.status_code == 400
    assert "timeout" in bad.json()["error"]["message"]
    assert unknown.json()["error"]["message"] == "spice is not a field this server knows."


async def test_abort_request() -> None:
    service = FakeService()
    async with app_client(service) as client:
        for body in ({"rid": "r"}, {"abort_all": True}, {"rid": "", "abort_all": True}):
            assert (await client.post("/abort_request", json=body)).status_code == 200
        for body in ({}, {"rid": ""}, {"abort_all": False}):
            assert (await client.post("/abort_request", json=body)).status_code == 400
        assert (await client.post("/abort_request", json={"rid": 5})).status_code == 400
    assert service.controls[:2] == [AbortRequest(rid="r"), AbortRequest(abort_all=True)]


async def test_ready_says_what_is_still_being_compiled() -> None:
    service = FakeService()
    async with app_client(service) as client:
        assert (await client.get("/ready")).text == "ready\n"
        service.num_programs_missing = 3
        early = await client.get("/ready")
        assert (early.status_code, early.text) == (200, "ready; 3 programs are still being compiled\n")


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
        assert await post("/tokenize", prompt=5) == (400, "prompt must be a string or a list or null, got 5.")


HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_renders_messages_as_chat_does(prefix: str) -> None:
    service = FakeService()
    shape = {"reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}
    async with app_client(service) as client:
        reply = await client.post(prefix + "/tokenize", json={"messages": HELLO, **shape})
        await client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, **shape})
        await client.post(prefix + "/tokenize", json={"messages": HELLO, "tools": [TOOL], "add_generation_prompt": False})
        await client.post(prefix + "/tokenize", json={"messages": HELLO, "tools": [TOOL], "tool_choice": "none"})
    tokens = reply.json()["tokens"]
    assert reply.json() == {"tokens": tokens, "count": len(tokens), "max_model_len": 100}
    assert service.requests[0].input_ids == [tokens]
    assert service.templated[0] == service.templated[1]
    assert (service.templated[2]["tools"], service.templated[2]["add_generation_prompt"]) == ([TOOL], False)
    assert service.templated[3]["tools"] is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "Exactly one of prompt and messages must be given."),
        ({"prompt": "a", "messages": HELLO}, "Exactly one of prompt and messages must be given."),
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"role": "user", "content": "unrenderable"}]}, "cannot render"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens must not be true with messages"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message needs a last message of the role"),
        (
            {
                "messages": [{"role": "assistant", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "exclude each other",
        ),
        ({"prompt": "a", "tools": []}, "tools needs messages instead of a prompt."),
        ({"prompt": "a", "text": "b"}, "text is not a field this server knows."),
    ],
)
async def test_what_cannot_be_tokenized(body: dict[str, Any], words: str) -> None:
    async with app_client(FakeService()) as client:
        reply = await client.post("/tokenize", json=body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


async def test_tokenizer_endpoints_know_one_model() -> None:
    async with app_client(FakeService()) as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await client.post(path, json={**body, "model": "default"})).status_code == 200
            assert (await client.post(path, json={**body, "model": "other"})).status_code == 404
            assert (await client.post(path, json={**body, "modle": "x"})).status_code == 400


async def test_the_api_is_described() -> None:
    async with app_client(FakeService()) as client:
        schema = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 200
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert "messages" in described["required"]
    assert "temperature" in described["properties"]
    assert "/generate" in schema["paths"]
