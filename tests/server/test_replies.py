"""GenerateReply: chunks to SGLang's reply object, cumulative and incremental."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.config import ServerArgs
from jaxserve.server.http.connection import event
from jaxserve.server.native.events import NativeEvents
from jaxserve.server.native.job import NativeJob
from jaxserve.server.native.replies import GenerateReply
from jaxserve.server.native.request import build_generate_request
from jaxserve.server.requests import GenerationChunk, PromptOptions, TokenLogprob
from jaxserve.types import FinishReason


def chunk(text: str, ids: list[int], *, last: bool = False) -> GenerationChunk:
    logprobs = [TokenLogprob(token, -0.5, [(token, -0.5), (9, -2.0)]) for token in ids]
    reason = FinishReason.stop(3) if last else None
    return GenerationChunk(0, "rid", text, ids, logprobs, 4, len(ids), 2, reason, {"e2e_latency": 1.0} if last else {})


def test_cumulative() -> None:
    reply = GenerateReply(PromptOptions(), weight_version="w")
    reply.add(chunk("a", [1]))
    first = reply.to_dict()
    assert (first["text"], first["output_ids"], first["meta_info"]["finish_reason"]) == ("a", [1], None)
    assert not reply.is_finished
    reply.add(chunk("b", [2, 3], last=True))
    assert reply.is_finished
    assert first["output_ids"] == [1], "a reply given out does not change"
    assert reply.to_dict() == {
        "text": "ab",
        "output_ids": [1, 2, 3],
        "meta_info": {
            "id": "rid", "finish_reason": {"type": "stop", "matched": 3}, "prompt_tokens": 4, "completion_tokens": 2,
            "cached_tokens": 2, "cached_tokens_details": {"device": 2, "host": 0}, "reasoning_tokens": 0,
            "weight_version": "w", "e2e_latency": 1.0,
        },
    }  # fmt: skip


def test_incremental_after_cumulative_calls() -> None:
    reply = GenerateReply(PromptOptions(return_logprob=True), index=3)
    reply.add(chunk("a", [1]))
    assert reply.delta_dict()["text"] == "a"
    reply.add(chunk("b", [2]))
    reply.add(chunk("c", [3]))
    reply.to_dict()
    delta = reply.delta_dict()
    assert (delta["text"], delta["output_ids"], delta["index"]) == ("bc", [2, 3], 3)
    assert len(delta["meta_info"]["output_token_logprobs"]) == 2
    assert reply.delta_dict()["text"] == ""


def test_logprobs_with_and_without_text() -> None:
    reply = GenerateReply(PromptOptions(return_logprob=True, top_logprobs_num=2), token_text=lambda token: f"<{token}>")
    reply.add(chunk("a", [1], last=True))
    meta = reply.to_dict()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 1, "<1>"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 1, "<1>"], [-2.0, 9, "<9>"]]]
    bare = GenerateReply(PromptOptions(return_logprob=True))
    bare.add(chunk("a", [1], last=True))
    assert bare.to_dict()["meta_info"]["output_token_logprobs"] == [[-0.5, 1, None]]
    assert "output_top_logprobs" not in bare.to_dict()["meta_info"]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
def test_streamed_bytes_are_those_of_the_reply(is_list: bool, incremental: bool) -> None:
    texts = ["a", '"q"\\', "", "\u00e9\n\t\x01", "\U0001f600", "/</script>"]
    rid = 'r"completion_tokens":1,'
    native = build_generate_request({"text": ["x"] if is_list else "x", "stream": True, "rid": rid}, None)
    job = NativeJob(native, ServerArgs(model_path="m", weight_version="w", incremental_streaming_output=incremental), str)
    events, replies = NativeEvents(job), job.streamed()
    for i, text in enumerate(texts):
        version = "" if i < 3 else "later"
        last = i == len(texts) - 1
        reason, meta = (FinishReason.stop(3), {"e2e_latency": 1.5}) if last else (None, {})
        one = GenerationChunk(0, rid, text, list(range(i % 3)), [], 4, i, i // 2, reason, meta, version)
        assert events.push(one) == event(msgspec.json.encode(replies.event(one)))
