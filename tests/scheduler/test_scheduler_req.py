"""The life cycle of a request and its logprob buffer."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.scheduler.answers import LogprobBuffer
from jaxserve.scheduler.req import Req, RequestState
from jaxserve.types import FinishReason, SamplingParams


def make_req() -> Req:
    return Req(rid="a", prompt_ids=np.array([1, 2], np.int32), sampling=SamplingParams(), max_new_tokens=5, seed=0)


@pytest.mark.parametrize(
    "path",
    [
        [RequestState.PREFILL, RequestState.DECODE, RequestState.FINISHED],
        [RequestState.PREFILL, RequestState.WAITING, RequestState.PREFILL],
        [RequestState.PREFILL, RequestState.DECODE, RequestState.WAITING, RequestState.FINISHED],
        [RequestState.FINISHED],
    ],
)
def test_legal_paths(path: list[RequestState]) -> None:
    req = make_req()
    for state in path:
        req.move_to(state)
    assert req.state is path[-1]


@pytest.mark.parametrize("path", [[RequestState.DECODE], [RequestState.WAITING], [RequestState.FINISHED, RequestState.WAITING]])
def test_illegal_paths(path: list[RequestState]) -> None:
    req = make_req()
    for state in path[:-1]:
        req.move_to(state)
    with pytest.raises(AssertionError, match="not legal"):
        req.move_to(path[-1])


def test_a_request_finishes_once() -> None:
    req = make_req()
    req.finish(FinishReason.stop(0))
    with pytest.raises(AssertionError):
        req.finish(FinishReason.stop(0))


def test_lengths_after_a_retraction() -> None:
    req = make_req()
    assert (req.fill_len, req.max_len, req.fill_ids.tolist()) == (2, 7, [1, 2])
    req.output_ids = np.array([7, 8], np.int32)
    assert (req.fill_len, req.max_len, req.fill_ids.tolist()) == (4, 7, [1, 2, 7, 8])


def test_logprobs_are_taken_once_and_cut_to_the_requested_number() -> None:
    buffer = LogprobBuffer(top_num=2, token_ids=None)
    for value in (-1.0, -2.0):
        buffer.append(np.array([4, 5, 6], np.int32), np.array([value, value - 1, value - 2], np.float32), None)
    out = buffer.take(np.array([-1.0, -2.0], np.float32))
    assert out.logprobs.tolist() == [-1.0, -2.0]
    assert out.top_ids is not None and out.top_ids.tolist() == [[4, 5], [4, 5]]
    assert out.top_logprobs is not None and out.top_logprobs.tolist() == [[-1.0, -2.0], [-2.0, -3.0]]
    empty = buffer.take(np.zeros(0, np.float32))
    assert len(empty.logprobs) == 0 and empty.top_ids is not None and empty.top_ids.shape == (0, 2)


def test_logprobs_without_alternatives() -> None:
    buffer = LogprobBuffer(top_num=0, token_ids=None)
    buffer.append(None, None, None)
    assert buffer.take(np.array([-1.0], np.float32)).top_ids is None
