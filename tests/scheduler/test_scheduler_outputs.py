"""What the detokenizer gets, and how often."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scheduler_harness import Harness, LetterDecoder, prompt_of

from jaxserve.messages import NO_STOP_TRIM, SKIP_SPECIAL_TOKENS, SPACES_BETWEEN_SPECIAL_TOKENS


def sizes(harness: Harness, max_new: int, **request: object) -> list[int]:
    rid = harness.submit(prompt_of(5), max_new, ignore_eos=True, **request)  # type: ignore[arg-type]
    harness.run()
    harness.assert_as_expected(rid)
    return harness.answer(rid).message_sizes


def test_streams_get_each_token(make_harness: Callable[..., Harness]) -> None:
    assert sizes(make_harness(), 5, stream=True) == [1, 1, 1, 1, 1]


def test_stream_interval(make_harness: Callable[..., Harness]) -> None:
    """The first token at once."""
    harness = make_harness({"stream_interval": 4})
    assert sizes(harness, 11, stream=True) == [1, 4, 4, 2]
    assert sizes(harness, 11, stream=True, stream_interval=2) == [1, 2, 2, 2, 2, 2]


def test_others_get_a_message_every_50_tokens(make_harness: Callable[..., Harness]) -> None:
    assert sizes(make_harness(), 120) == [50, 50, 20]
    assert sizes(make_harness(), 50) == [50]
    assert sizes(make_harness(), 3, stream_interval=1) == [3]


def test_first_message(make_harness: Callable[..., Harness]) -> None:
    """The harness checks that exactly the first message with tokens carries the prompt's tail."""
    harness = make_harness(text_decoder=LetterDecoder())
    streamed = harness.submit([1, 2, 3, 4, 5, 6, 7], 4, stream=True, stop=["zzzz"])
    plain = harness.submit([8, 9], 4)
    harness.run()
    assert harness.answer(streamed).prompt_tail == [3, 4, 5, 6, 7] and harness.answer(streamed).stops == ["zzzz"]
    assert harness.answer(plain).prompt_tail == [8, 9] and harness.answer(plain).stops is None


def test_decode_flags(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    default = harness.submit([1, 2], 2, ignore_eos=True)
    other = harness.submit(
        [1, 3], 2, stream=True, skip_special_tokens=False, spaces_between_special_tokens=False, no_stop_trim=True
    )
    harness.run()
    assert harness.answer(default).decode_flags == SKIP_SPECIAL_TOKENS | SPACES_BETWEEN_SPECIAL_TOKENS
    assert harness.answer(other).decode_flags == NO_STOP_TRIM


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(make_harness: Callable[..., Harness], stream: bool) -> None:
    harness = make_harness()
    rids = [harness.submit(prompt_of(5, k), 60, stream=stream, return_logprob=True, top_logprobs_num=k) for k in (0, 2, 4)]
    plain = harness.submit(prompt_of(7), 60, stream=stream)
    harness.run()
    harness.assert_as_expected()
    assert harness.answer(plain).logprobs == []
    for rid, k in zip(rids, (0, 2, 4), strict=True):
        answer = harness.answer(rid)
        logprobs = np.concatenate([part.logprobs for part in answer.logprobs])
        assert logprobs == pytest.approx([-(token + 1) / 101 for token in answer.token_ids])
        if not k:
            assert all(part.top_ids is None and part.top_logprobs is None for part in answer.logprobs)
            continue
        top_ids = np.concatenate([part.top_ids for part in answer.logprobs if part.top_ids is not None])
        top_logprobs = np.concatenate([part.top_logprobs for part in answer.logprobs if part.top_logprobs is not None])
        assert top_ids.tolist() == [[(token + j) % 101 for j in range(k)] for token in answer.token_ids]
        assert (np.diff(top_logprobs, axis=1) < 0).all()


def test_one_message_for_all_rows_of_a_step(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(overlap=False)
    rids = [harness.submit(prompt_of(5, i), 3, stream=True, ignore_eos=True) for i in range(4)]
    batches: list[list[str]] = []
    send = harness.transport.send_output
    harness.transport.send_output = lambda m: (batches.append(m.rids), send(m))  # type: ignore[method-assign, assignment]
    harness.scheduler._outputs._send = harness.transport.send_output
    harness.run()
    assert batches == [rids, rids, rids]
