"""Sessions on a live server: turns reuse what was computed, and give what the same tokens sent whole give."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer

FIRST, SECOND, THIRD = list(range(100, 150)), list(range(150, 170)), list(range(170, 175))
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


class Client:
    """A session of the server."""

    def __init__(self, server: LiveServer, **options: Any) -> None:
        self.server = server
        self.id = server.post("/open_session", {"capacity_of_str_len": 1000, **options}).json()

    def turn(self, ids: list[int], after: dict[str, Any] | None = None, *, body: Any = None, **params: Any) -> dict[str, Any]:
        rid = after["meta_info"]["id"] if after else None
        reply: dict[str, Any] = self.server.generate(
            input_ids=ids,
            sampling_params=GREEDY,
            session_params={"id": self.id, "rid": rid, **params},
            return_prompt_token_ids=True,
            **(body or {}),
        )
        return reply

    def refused(self, ids: list[int], rid: str | None, **params: Any) -> str:
        body = {"input_ids": ids, "session_params": {"id": self.id, "rid": rid, **params}, "sampling_params": GREEDY}
        reply = self.server.post("/generate", body)
        assert reply.status_code == 400, reply.text
        message: str = reply.json()["error"]["message"]
        return message


@contextlib.contextmanager
def one_running(server: LiveServer, **body: Any) -> Iterator[concurrent.futures.Future[Any]]:
    """A request that runs, slowly, while the block is carried out."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        server.post("/slow_down", {"forward_sleep_time": 0.02})
        try:
            running = pool.submit(server.generate, **body)
            deadline_s = time.monotonic() + 30
            while not server.internal_state()["num_running_reqs"]:
                assert time.monotonic() < deadline_s
            yield running
        finally:
            server.post("/slow_down", {"forward_sleep_time": 0})


def whole(server: LiveServer, ids: list[int], **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = server.generate(input_ids=ids, sampling_params=GREEDY, **body)
    return reply


def test_turns_equal_the_same_tokens_sent_whole(demo_server: LiveServer) -> None:
    session = Client(demo_server)
    demo_server.post("/flush_cache?timeout=10", {})
    first = session.turn(FIRST)
    second = session.turn(SECOND, first)
    third = session.turn(THIRD, second, body={"return_logprob": True, "logprob_start_len": 60})
    history = [*FIRST, *first["output_ids"], *SECOND]
    assert second["prompt_token_ids"] == history and second["meta_info"]["prompt_tokens"] == len(history)
    # What the last output token would add is computed when it is needed: pages of 16 hold the rest.
    assert second["meta_info"]["cached_tokens"] == (len(FIRST) + len(first["output_ids"]) - 1) // 16 * 16
    history += [*second["output_ids"], *THIRD]
    assert [token for _, token, _ in third["meta_info"]["input_token_logprobs"]] == history[60:]
    demo_server.post("/flush_cache?timeout=10", {})
    alone = whole(demo_server, history, return_logprob=True, logprob_start_len=60)
    assert alone["meta_info"]["cached_tokens"] == 0
    assert third["output_ids"] == alone["output_ids"]
    pairs = zip(*(reply["meta_info"]["input_token_logprobs"][1:] for reply in (third, alone)), strict=True)
    assert all(here == pytest.approx(there, abs=1e-3) for (here, *_), (there, *_) in pairs)
    branch = session.turn(THIRD, first)
    assert branch["output_ids"] == whole(demo_server, [*FIRST, *first["output_ids"], *THIRD])["output_ids"]
    rewound = session.turn(SECOND, second, offset=-5, drop_previous_output=True)
    assert rewound["prompt_token_ids"] == [*FIRST, *first["output_ids"], *SECOND[:-5], *SECOND]
    demo_server.assert_whole()


def test_a_replaced_turn_is_aborted(demo_server: LiveServer) -> None:
    session = Client(demo_server)
    first = session.turn(FIRST)
    long = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    params = {"id": session.id, "rid": first["meta_info"]["id"]}
    body = {"input_ids": SECOND, "rid": "running", "sampling_params": long, "session_params": params}
    with one_running(demo_server, **body) as running:
        assert "'running' has not ended yet" in session.refused(THIRD, "running")
        again = session.turn(THIRD, first, replace=True)
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert "no turn 'running'" in session.refused(THIRD, "running")
    assert again["prompt_token_ids"] == [*FIRST, *first["output_ids"], *THIRD]
    demo_server.assert_whole()


def test_closing_while_a_turn_runs(demo_server: LiveServer) -> None:
    session = Client(demo_server)
    body = {"input_ids": FIRST, "sampling_params": GREEDY, "session_params": {"id": session.id}}
    with one_running(demo_server, **body) as running:
        assert demo_server.post("/close_session", {"session_id": session.id}).status_code == 200
        assert "There is no session" in session.refused(FIRST, None)
    assert running.result()["output_ids"] == whole(demo_server, FIRST)["output_ids"]
    assert demo_server.post("/close_session", {"session_id": session.id}).status_code == 400


def test_what_is_refused(demo_server: LiveServer) -> None:
    session = Client(demo_server, session_id="mine")
    assert session.id == "mine"
    taken = demo_server.post("/open_session", {"capacity_of_str_len": 10, "session_id": "mine"})
    assert taken.status_code == 400 and "'mine' is open already" in taken.text
    first = session.turn(FIRST)
    rid = first["meta_info"]["id"]
    assert "offset must lie within the 62 tokens" in session.refused(THIRD, rid, offset=63)
    assert "capacity_of_str_len is 1000" in session.refused([5] * 1000, rid)
    assert "has no turn 'other'" in session.refused(THIRD, "other")
    two = {"input_ids": THIRD, "session_params": {"id": "mine"}, "sampling_params": {"n": 2}}
    assert "n=2" in demo_server.post("/generate", two).json()["error"]["message"]
    assert demo_server.post("/open_session", {"capacity_of_str_len": 0}).status_code == 400
    assert session.turn(THIRD, first)["meta_info"]["prompt_tokens"] == 67
    demo_server.post("/close_session", {"session_id": "mine"})
