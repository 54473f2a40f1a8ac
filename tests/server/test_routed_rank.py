"""Naming a replica: two fields, a header, and who wins."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_service import FakeService
from http_harness import app_client, error_message
from pipeline_harness import running

from jaxserve.server.http.app import create_app
from jaxserve.server.native.positions import generate_body
from jaxserve.server.native.request import build_generate_request
from jaxserve.server.requests import RequestError
from jaxserve.server.routed_rank import rank_header, rank_of_header

HEADER = "x-data-parallel-rank"
MESSAGES = [{"role": "user", "content": "a"}]
# Every route that generates, with a body for it.
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"model": "default", "messages": MESSAGES, "max_tokens": 2},
    "/api/chat": {"model": "default", "messages": MESSAGES, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"model": "default", "prompt": "a", "stream": False, "options": {"num_predict": 2}},
}
WITH_FIELDS = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", WITH_FIELDS)
@pytest.mark.parametrize(
    ("fields", "rank"),
    [
        ({}, None),
        ({"routed_dp_rank": None, "data_parallel_rank": None}, None),
        ({"data_parallel_rank": 0}, 0),
        ({"routed_dp_rank": 3}, 3),
        ({"routed_dp_rank": 3, "data_parallel_rank": 3}, 3),
    ],
)
async def test_either_name_is_taken(path: str, fields: dict[str, Any], rank: int | None) -> None:
    service = FakeService()
    async with app_client(service) as client:
        reply = await client.post(path, json={**ROUTES[path], **fields})
    assert reply.status_code == 200, reply.text
    assert service.requests[0].data_parallel_rank == rank


@pytest.mark.parametrize("path", WITH_FIELDS)
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"data_parallel_rank": True}, "data_parallel_rank"),
        ({"data_parallel_rank": [0, 1]}, "data_parallel_rank"),
        ({"routed_dp_rank": False}, "routed_dp_rank"),
        ({"routed_dp_rank": "0"}, "routed_dp_rank"),
        ({"routed_dp_rank": 0.5}, "routed_dp_rank"),
        ({"routed_dp_rank": 0, "data_parallel_rank": 1}, "routed_dp_rank"),
    ],
)
async def test_what_is_no_rank_is_refused_by_name(path: str, fields: dict[str, Any], name: str) -> None:
    async with app_client(FakeService()) as client:
        reply = await client.post(path, json={**ROUTES[path], **fields})
    assert reply.status_code == 400 and name in error_message(reply)


def test_an_engine_takes_them_at_sglangs_positions_and_by_name() -> None:
    positions = [None] * 19 + [2]  # routed_dp_rank
    assert build_generate_request(generate_body("a", {}, None, positions, {})).req.data_parallel_rank == 2
    assert build_generate_request(generate_body("a", {}, None, (), {"data_parallel_rank": 1})).req.data_parallel_rank == 1


@pytest.mark.parametrize("text", ["", " 1", "-1", "+1", "1.0", "1_0", "0x1", "one", "١", "9" * 5000])
def test_a_header_is_decimal_digits(text: str) -> None:
    before = rank_header.set(text)
    try:
        with pytest.raises(RequestError, match=HEADER) as caught:
            rank_of_header()
    finally:
        rank_header.reset(before)
    assert caught.value.status_code == 400 and len(caught.value.message) < 200


async def test_the_header_holds_for_every_protocol_and_goes_before_the_body() -> None:
    async with running(dp_size=2) as pipeline:
        app = create_app(pipeline.manager, pipeline.args)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:

            async def served_by() -> list[int]:
                """How many requests each replica has had."""
                states = (await client.get("/server_info")).json()["internal_states"]
                return [state["num_requests"] for state in states]

            wanted = await served_by()
            for path, body in ROUTES.items():
                for rank in (0, 1, 1):
                    reply = await client.post(path, json=body, headers={HEADER: str(rank)})
                    assert reply.status_code == 200, (path, reply.text)
                    wanted[rank] += 1
                assert await served_by() == wanted, path
                for wrong, word in (("x", HEADER), ("2", "[0, 2)")):
                    reply = await client.post(path, json=body, headers={HEADER: wrong})
                    assert reply.status_code == 400 and word in error_message(reply), (path, reply.text)
            for path in WITH_FIELDS:
                for headers, rank in (({}, 0), ({HEADER: "1"}, 1)):
                    reply = await client.post(path, json={**ROUTES[path], "routed_dp_rank": 0}, headers=headers)
                    assert reply.status_code == 200, reply.text
                    wanted[rank] += 1
            streamed = await client.post("/generate", json={**ROUTES["/generate"], "stream": True}, headers={HEADER: "1"})
            assert streamed.status_code == 200
            wanted[1] += 1
            assert await served_by() == wanted
            assert (await client.post("/generate", json=ROUTES["/generate"])).status_code == 200  # no header lingers
