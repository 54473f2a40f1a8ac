"""Replies with hundreds of thousands of logprobs or numbers of hidden states: the loop answers others meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import FakeService
from http_harness import app_client, events_of, live_server, until

from jaxserve.messages import HiddenStates, InputLogprobs, TokenLogprobs
from jaxserve.server.garbage import settle_garbage_collector
from jaxserve.server.requests import GenerateReqInput, GenerationChunk
from jaxserve.types import FinishReason

# Of one piece of work the loop would be blocked for seconds with these.
PROMPT_LEN, TOP, HIDDEN_LEN, HIDDEN_SIZE = 30_000, 20, 250, 2048
MOST_LAG_S = 0.2


class LongPrompts(FakeService):
    """Every prompt has as many tokens as PROMPT_LEN says, whatever came."""

    def _chunk(self, req: GenerateReqInput, index: int, rid: str, prompt: list[int], step: int) -> GenerationChunk:
        chunk = super()._chunk(req, index, rid, prompt, step)
        if chunk.input_logprobs is not None:
            chunk.input_logprobs = _logprobs(PROMPT_LEN)
        if step == 1 and chunk.hidden_states:
            chunk.hidden_states = [HiddenStates(prompt=np.full((HIDDEN_LEN, HIDDEN_SIZE), 1 / 3, np.float32))]
        return chunk


def _logprobs(prompt_len: int) -> InputLogprobs:
    others = (prompt_len - 1, TOP)
    values = TokenLogprobs(
        logprobs=np.full(prompt_len - 1, -1 / 3, np.float32),
        top_ids=np.tile(np.arange(100, 100 + TOP, dtype=np.int32), (prompt_len - 1, 1)),
        top_logprobs=np.full(others, -1 / 3, np.float32),
    )
    return InputLogprobs(token_ids=np.full(prompt_len, 97, np.int32), logprobs=values)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs": ("/generate", {"return_logprob": True, "top_logprobs_num": TOP, "logprob_start_len": 0}),
    "hidden states": ("/generate", {"return_hidden_states": True}),
    "echo": ("/v1/completions", {"echo": True, "logprobs": TOP, "max_tokens": 2}),
}


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return (
        {"prompt": "x", **fields}
        if path.startswith("/v1")
        else {"text": "x", "sampling_params": {"max_new_tokens": 2}, **fields}
    )


@pytest.fixture
def settled_garbage() -> Iterator[None]:
    """As in a server: what was there before is not looked at by the collector."""
    thresholds = gc.get_threshold()
    settle_garbage_collector()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class LagWatch:
    """The longest time that the running loop did not get to a task that is always ready."""

    def __init__(self) -> None:
        self.most_s = 0.0

    async def __aenter__(self) -> LagWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            self.most_s, last = max(self.most_s, now - last), now


@pytest.mark.usefixtures("settled_garbage")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", BODIES)
async def test_the_loop_answers_others_meanwhile(what: str, stream: bool) -> None:
    path, fields = BODIES[what]

    def read(url: str) -> int:
        with httpx.stream("POST", url + path, json={**body_of(path, fields), "stream": stream}, timeout=120) as reply:
            assert reply.status_code == 200
            return sum(map(len, reply.iter_raw(1 << 20)))

    async with live_server(LongPrompts()) as url:
        lags = []
        for _ in range(4):  # a machine that has much else to do is late now and then, a blocked loop always
            async with LagWatch() as lag:
                num_bytes = await asyncio.to_thread(read, url)
            assert num_bytes > 5_000_000, "the reply was not long enough to tell"
            lags.append(lag.most_s)
            if lag.most_s < MOST_LAG_S:
                return
    pytest.fail(f"others waited {min(lags):.2f} s")


async def test_the_events_of_a_long_prompt_say_what_one_would() -> None:
    body = {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 2}
    async with app_client(LongPrompts()) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        events = events_of((await client.post("/v1/completions", json={**body, "stream": True})).text)
    choices = [event["choices"][0] for event in events]
    assert len(choices) > PROMPT_LEN / 1024
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for field, values in whole["logprobs"].items():
        assert [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][field]] == values
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


async def test_a_paced_stream_tells_errors_as_others_do() -> None:
    body = {"text": "x", "return_logprob": True, "stream": True}
    service = FakeService()
    service.step_s, service.fail_after = 0.02, (3, FinishReason.abort("it broke", 503))
    async with app_client(service) as client:
        broken = await client.post("/generate", json=body)
        refused = await client.post("/generate", json={**body, "text": "x" * 200})
        service.crash = ValueError("unexpected")
        crashed = await client.post("/generate", json=body)
    *_, last = events_of(broken.text)
    assert broken.status_code == 200
    assert last["error"]["message"] == "it broke"
    assert (refused.status_code, crashed.status_code) == (400, 500)


async def test_a_client_that_leaves_a_paced_stream_aborts_its_request() -> None:
    service = FakeService()
    service.endless, service.step_s = True, 0.002
    body = {"text": "x", "rid": "r", "return_logprob": True, "stream": True}
    async with live_server(service) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/generate", json=body) as reply:
            async for _ in reply.aiter_bytes():
                break
        await until(lambda: service.aborted == ["r"])
