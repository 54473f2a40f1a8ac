"""How many numbers a request may ask for, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.server.reply_limits import ReplyLimits
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError
from jaxserve.types import SamplingParams

LIMITS = ReplyLimits(1000, hidden_size=64, num_experts=20)
ROOM = 500


def rooms(prompt_lens: list[int], limits: ReplyLimits = LIMITS, n: int = 1, new: int | None = 10, **fields: Any) -> list[int]:
    options = [PromptOptions(**fields)] * len(prompt_lens)
    params = [SamplingParams(max_new_tokens=new, n=n)] * len(prompt_lens)
    req = GenerateReqInput(input_ids=[[1]] * len(prompt_lens), sampling_params=params, options=options)
    return limits.rooms(req, prompt_lens, [ROOM if new is None else new] * len(prompt_lens))


LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 4}


@pytest.mark.parametrize(
    ("prompt_lens", "how"),
    [
        ([190], {**LOGPROBS, "logprob_start_len": 0}),  # (190 + 10) * 5
        ([400], {**LOGPROBS, "logprob_start_len": 210}),
        ([90, 90], {**LOGPROBS, "logprob_start_len": 0}),
        ([90], {**LOGPROBS, "logprob_start_len": 0, "n": 2}),
        ([400], {**LOGPROBS, "new": 200}),
        ([400], {"return_logprob": True, "token_ids_logprob": (1, 2, 3, 4), "new": 200}),
        ([5], {"return_hidden_states": True}),  # 15 * 64
        ([40], {"return_routed_experts": True}),  # (40 + 10) * 20
        ([400], {"return_routed_experts": True, "routed_experts_start_len": 360}),
    ],
)
def test_what_just_fits(prompt_lens: list[int], how: dict[str, Any]) -> None:
    new = how.get("new", 10)
    assert rooms(prompt_lens, **how) == [new] * len(prompt_lens)
    with pytest.raises(RequestError, match="one reply may hold at most 1000"):
        rooms(prompt_lens, **{**how, "new": new + 1})


def test_what_is_not_said_is_not_counted() -> None:
    assert rooms([400], return_hidden_states="last", n=15) == [10]  # one for each sample
    assert rooms([400], top_logprobs_num=4, logprob_start_len=0) == [10]  # of no effect without return_logprob


@pytest.mark.parametrize(
    ("how", "sentence", "param"),
    [
        ({**LOGPROBS, "logprob_start_len": 0}, r"top_logprobs_num \(4\) asks for 1005 numbers", "top_logprobs_num"),
        ({"return_hidden_states": True}, r"return_hidden_states \(True\) asks for 12864 numbers", "return_hidden_states"),
        ({"return_hidden_states": "last", "n": 16}, r"return_hidden_states \(last\) asks for 1024", "return_hidden_states"),
        ({"return_routed_experts": True}, r"return_routed_experts \(True\) asks for 4020 numbers", "return_routed_experts"),
        (
            {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": tuple(range(9))},
            r"token_ids_logprob \(9 tokens\) asks for 2010",
            "token_ids_logprob",
        ),
    ],
)
def test_the_sentence_names_the_field_its_value_and_the_limit(how: dict[str, Any], sentence: str, param: str) -> None:
    with pytest.raises(RequestError, match=sentence + r".*at most 1000 \(--max-reply-numbers\)") as caught:
        rooms([191], **how)
    assert caught.value.param == param


def test_what_a_request_leaves_open_is_as_much_as_there_is_room_for() -> None:
    assert rooms([100], new=None) == [ROOM]
    assert rooms([100], new=None, **LOGPROBS) == [200]
    assert rooms([100], new=None, logprob_start_len=0, **LOGPROBS) == [100]
    assert rooms([100, 100], new=None, n=2, **LOGPROBS) == [50, 50]
    with pytest.raises(RequestError, match="asks for 1005 numbers"):
        rooms([200], new=None, logprob_start_len=0, **LOGPROBS)


def test_there_may_be_no_limit() -> None:
    assert rooms([10**6], ReplyLimits(None, 0), logprob_start_len=0, **LOGPROBS) == [10]
