"""The endpoints around generation, on a live server with the demo model."""

from __future__ import annotations

import concurrent.futures
import math
import time

import pytest
from live_server import LiveServer

from jaxserve.demo import demo_model_path


def test_health_and_readiness(demo_server: LiveServer) -> None:
    for path in ("/health", "/health_generate", "/ready"):
        assert demo_server.get(path).status_code == 200
    assert "jaxserve" in demo_server.get("/").text


def test_model_info_has_sglangs_fields(demo_server: LiveServer) -> None:
    info = demo_server.get("/model_info").json()
    assert info["model_path"] == info["tokenizer_path"] == info["served_model_name"] == demo_model_path()
    assert info["is_generation"] is True
    assert (info["weight_version"], info["load_format"]) == ("default", "auto")


def test_server_info_shows_what_was_chosen(demo_server: LiveServer) -> None:
    info = demo_server.get("/server_info").json()
    assert (info["dtype"], info["page_size"], info["context_length"]) == ("float32", 16, 2048)
    assert info["status"] == "ready"
    assert info["internal_states"][0]["runner"]["memory_usage"]["token_capacity"] >= 2048


def test_loads(demo_server: LiveServer) -> None:
    (load,) = demo_server.get("/v1/loads").json()["loads"]
    assert load["num_waiting_reqs"] == 0
    assert load["max_total_num_tokens"] >= 2048


def test_tokenize_and_back(demo_server: LiveServer) -> None:
    text = "Grüße 🙂 from jaxserve"
    tokens = demo_server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert demo_server.post("/detokenize", {"tokens": tokens}).json()["text"] == text


def test_cached_tokens_until_the_cache_is_flushed(demo_server: LiveServer) -> None:
    request = {"input_ids": list(range(100, 180)), "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    demo_server.generate(**request)
    assert demo_server.generate(**request)["meta_info"]["cached_tokens"] == 64
    assert demo_server.post("/flush_cache?timeout=10", {}).status_code == 200
    assert demo_server.generate(**request)["meta_info"]["cached_tokens"] == 0
    salted = {**request, "cache_salt": "mine"}
    assert demo_server.generate(**salted)["meta_info"]["cached_tokens"] == 0
    assert demo_server.generate(**salted)["meta_info"]["cached_tokens"] == 64


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_tokens(demo_server: LiveServer, mode: str) -> None:
    sampling = {"max_new_tokens": 300, "temperature": 0.8, "sampling_seed": 5, "ignore_eos": True}
    request = {"input_ids": list(range(200, 240)), "sampling_params": sampling}
    whole = demo_server.generate(**request)["output_ids"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(demo_server.generate, **request) for _ in range(2)]
        deadline_s = time.monotonic() + 30
        while demo_server.internal_state()["num_running_reqs"] < 2:
            assert time.monotonic() < deadline_s
        assert demo_server.post("/pause_generation", {"mode": mode}).json()["status"] == "ok"
        state = demo_server.internal_state()
        assert (state["is_paused"], state["num_running_reqs"]) == (True, 0 if mode == "retract" else 2)
        assert demo_server.post("/flush_cache", {}).status_code == (200 if mode == "retract" else 400)
        late = pool.submit(demo_server.generate, **request)
        assert [demo_server.get(path).status_code for path in ("/health", "/health_generate", "/ready")] == [200, 200, 503]
        assert not any(one.done() for one in [*running, late])
        assert demo_server.post("/continue_generation", {}).status_code == 200
        assert [one.result()["output_ids"] for one in [*running, late]] == [whole] * 3
    demo_server.assert_whole()


def test_freeze_gc_and_live_options(demo_server: LiveServer) -> None:
    assert demo_server.post("/freeze_gc", {}).text == "Garbage collection frozen.\n"
    assert demo_server.post("/set_internal_state", {"server_args": {"max_queued_requests": 1000}}).json() == [True]
    assert demo_server.internal_state()["max_queued_requests"] == 1000
    refused = demo_server.post("/set_internal_state", {"server_args": {"page_size": 1}})
    assert "server_args.page_size cannot be changed" in refused.json()["error"]["message"]
    assert demo_server.post("/set_internal_state", {"server_args": {"max_queued_requests": None}}).json() == [True]


def test_generate_replies_in_sglangs_shape(demo_server: LiveServer) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    reply = demo_server.generate(text="one two", sampling_params=sampling, return_logprob=True, top_logprobs_num=2, rid="mine")
    assert set(reply) >= {"text", "output_ids", "meta_info"}
    meta = reply["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["completion_tokens"], len(reply["output_ids"])) == (5, 5)
    assert [token for _, token, _ in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    events = list(demo_server.stream("/generate", {"text": "one two", "sampling_params": sampling}))
    assert events[-1]["text"] == reply["text"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_penalties_bias_and_minimum_lengths_reach_the_device(demo_server: LiveServer) -> None:
    base = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    biased = demo_server.generate(text="x", sampling_params={**base, "logit_bias": {"70": 200.0}})
    assert set(biased["output_ids"]) == {70}
    penalized = {**base, "logit_bias": {"70": 15.0}, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    assert set(demo_server.generate(text="x", sampling_params=penalized)["output_ids"]) != {70}
    eos_id = 1
    stopping = {**base, "logit_bias": {str(eos_id): 200.0}, "stop_token_ids": [eos_id]}
    assert demo_server.generate(text="x", sampling_params=stopping)["meta_info"]["completion_tokens"] == 1
    held_back = demo_server.generate(text="x", sampling_params={**stopping, "min_new_tokens": 6})
    assert held_back["meta_info"]["completion_tokens"] == 7
    assert held_back["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos_id}
    demo_server.assert_whole()


def test_scores_are_the_probabilities_of_the_next_token(demo_server: LiveServer) -> None:
    query, items, labels = list(range(100, 140)), [[5, 6], [7]], [10, 11, 12]
    body = {"query": query, "items": items, "label_token_ids": labels}
    scores = demo_server.post("/v1/score", body).json()["scores"]
    for item, found in zip(items, scores, strict=True):
        meta = demo_server.generate(
            input_ids=[*query, *item],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=0,
        )["meta_info"]
        assert meta["output_token_logprobs"] == [] and len(meta["input_token_logprobs"]) == len(query) + len(item)
        asked = demo_server.generate(
            input_ids=[*query, *item, labels[0]],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=len(query) + len(item) - 1,
            token_ids_logprob=labels,
        )["meta_info"]
        expected = [math.exp(logprob) for logprob, _, _ in asked["input_token_ids_logprobs"][1]]
        assert found == pytest.approx(expected, rel=1e-3)
    shares = demo_server.post("/v1/score", {**body, "apply_softmax": True}).json()["scores"]
    assert [sum(share) for share in shares] == pytest.approx([1, 1])
    of_each = demo_server.post("/v1/score", {**body, "label_token_ids": [labels, labels[1:]], "return_token_logprobs": True})
    expected = [[math.log(score) for score in found] for found in (scores[0], scores[1][1:])]
    assert of_each.json()["token_logprobs"] == [pytest.approx(logprobs, rel=1e-3) for logprobs in expected]
    wrong = demo_server.post("/v1/score", {**body, "label_token_ids": [10**6]})
    assert wrong.status_code == 400 and "an out-of-vocabulary token id" in wrong.json()["error"]["message"]
