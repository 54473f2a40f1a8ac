"""Sessions: which tokens a turn's prompt has, whatever was appended, replaced, dropped or rewound before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.server.requests import RequestError, SessionParams
from jaxserve.server.sessions import Sessions, Turn
from jaxserve.types import FinishReason

BOS = 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Conversation:
    """A session, with turns whose outputs are given."""

    def __init__(self, capacity: int = 1000, **options: Any) -> None:
        self.clock = Clock()
        self.sessions = Sessions(self.clock)
        options = {"appends_only": False, "timeout_s": None} | options
        self.id = self.sessions.open(capacity, None, **options)

    def begin(self, rid: str, new: list[int], after: str | None = None, **params: Any) -> tuple[Turn, list[str]]:
        return self.sessions.begin(SessionParams(id=self.id, rid=after, **params), rid, np.array(new, np.int32), BOS)

    def turn(self, rid: str, new: list[int], outputs: list[int], after: str | None = None, **params: Any) -> list[int]:
        """The prompt of a turn that ends with `outputs`."""
        turn, _ = self.begin(rid, new, after, **params)
        turn.take_in(outputs[:1], None)
        turn.take_in(outputs[1:], FinishReason.length_limit(len(outputs)))
        return turn.prompt_ids().tolist()

    @property
    def num_tokens(self) -> int:
        return self.sessions._count.tokens


def test_turns_go_on_from_one_another() -> None:
    session = Conversation()
    assert session.turn("a", [BOS, 2, 3], [4, 5]) == [BOS, 2, 3]
    assert session.turn("b", [6], [7], "a") == [BOS, 2, 3, 4, 5, 6]
    assert session.turn("c", [8], [9], "b") == [BOS, 2, 3, 4, 5, 6, 7, 8]
    assert session.turn("another", [8], [9]) == [8], "without a rid it goes on from nothing"
    assert session.num_tokens == 5 + 2 + 2 + 2


def test_branches() -> None:
    session = Conversation()
    session.turn("a", [2, 3], [4])
    assert session.turn("left", [10], [11], "a") == [2, 3, 4, 10]
    assert session.turn("right", [20], [21], "a") == [2, 3, 4, 20]
    assert session.turn("left2", [12], [], "left") == [2, 3, 4, 10, 11, 12]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [2, 3, 4, 5, 9]),
        ({"offset": 0}, [2, 3, 4, 5, 9]),
        ({"offset": 1}, [2, 9]),
        ({"offset": 4}, [2, 3, 4, 5, 9]),
        ({"offset": -1}, [2, 3, 4, 9]),
        ({"offset": -4}, [9]),
        ({"drop_previous_output": True}, [2, 3, 9]),
        ({"drop_previous_output": True, "offset": -1}, [2, 9]),
    ],
)
def test_what_is_kept_of_the_turn_before(params: dict[str, Any], expected: list[int]) -> None:
    session = Conversation()
    session.turn("a", [2, 3], [4, 5])
    assert session.turn("b", [9], [], "a", **params) == expected
    assert session.turn("c", [7], [], "b") == [*expected, 7]


def test_a_rewound_turn_keeps_no_more_than_what_it_was_rewound_to() -> None:
    session = Conversation()
    session.turn("a", [2, 3], [4, 5])
    session.turn("b", [6], [7, 8], "a", offset=3)
    assert session.turn("c", [9], [], "b", offset=-2) == [2, 3, 4, 6, 9]
    assert session.turn("d", [9], [], "b", offset=2) == [2, 3, 9]


def test_an_appended_prompt_loses_its_bos() -> None:
    session = Conversation()
    session.turn("a", [BOS, 2], [3])
    assert session.turn("b", [BOS, 4], [], "a") == [BOS, 2, 3, 4]


def test_replacing_drops_what_followed() -> None:
    session = Conversation()
    session.turn("a", [2], [3])
    session.turn("b", [4], [5], "a")
    session.turn("c", [6], [7], "b")
    assert session.turn("b2", [8], [9], "a", replace=True) == [2, 3, 8]
    for gone in ("b", "c"):
        with pytest.raises(RequestError, match=f"no turn '{gone}'"):
            session.begin("x", [1], gone)
    session.turn("new", [4], [5], replace=True)
    with pytest.raises(RequestError, match="no turn 'a'"):
        session.begin("x", [1], "a")
    assert session.num_tokens == 2


def test_replacing_aborts_what_runs() -> None:
    session = Conversation()
    session.turn("a", [2], [3])
    running, _ = session.begin("b", [4], "a")
    running.take_in([5, 6], None)
    followed, aborted = session.begin("c", [7], "b", replace=True)
    assert aborted == ["b"]
    assert followed.prompt_ids().tolist() == [2, 3, 4, 5, 6, 7], "it ends with what it had"
    running.take_in([50, 60], FinishReason.abort("aborted"))
    assert followed.prompt_ids().tolist() == [2, 3, 4, 5, 6, 7]
    other, _ = session.begin("d", [8], "a")
    _, aborted = session.begin("e", [9], "a", replace=True)
    assert sorted(aborted) == ["c", "d"]
    assert not other.take_in([1], FinishReason.abort("aborted"))


def test_a_running_turn_cannot_be_followed() -> None:
    session = Conversation()
    running, _ = session.begin("a", [2])
    with pytest.raises(RequestError, match="The turn 'a' has not ended yet"):
        session.begin("b", [3], "a")
    running.take_in([4], FinishReason.stop(4))
    assert session.turn("b", [3], [], "a") == [2, 4, 3]


def test_what_was_refused_is_forgotten() -> None:
    session = Conversation()
    session.turn("a", [2], [3])
    refused, _ = session.begin("b", [4], "a")
    refused.take_in([], FinishReason.abort("The request queue is full.", 503, "ServiceUnavailableError"))
    assert session.turn("b", [4], [5], "a") == [2, 3, 4], "it can be sent again"
    aborted, _ = session.begin("c", [6], "b")
    aborted.take_in([7], None)
    aborted.take_in([], FinishReason.abort("The request was aborted."))
    assert session.turn("d", [8], [], "c") == [2, 3, 4, 5, 6, 7, 8]


def test_closing_while_a_turn_runs() -> None:
    session = Conversation()
    session.turn("a", [2], [3])
    running, _ = session.begin("b", [4], "a")
    session.sessions.close(session.id)
    assert running.prompt_ids().tolist() == [2, 3, 4]
    running.take_in([5], FinishReason.stop(5))
    assert session.num_tokens == 0 and not len(session.sessions)
    with pytest.raises(RequestError, match="There is no session"):
        session.begin("c", [1])
    with pytest.raises(ValueError, match="There is no session"):
        session.sessions.close(session.id)


def test_a_session_that_is_idle_for_too_long_is_closed() -> None:
    session = Conversation(timeout_s=10)
    running, _ = session.begin("a", [2])
    session.clock.now_s += 100
    running.take_in([3], FinishReason.stop(3))
    session.clock.now_s += 9
    assert session.turn("b", [4], [], "a") == [2, 3, 4]
    session.clock.now_s += 11
    with pytest.raises(RequestError, match="There is no session"):
        session.begin("c", [1], "b")
    assert session.num_tokens == 0


def test_streaming_sessions_only_append() -> None:
    session = Conversation(appends_only=True)
    assert session.turn("a", [2], [3]) == [2]
    assert session.turn("b", [4], [5]) == [2, 3, 4]
    for name, value in (("replace", True), ("drop_previous_output", True), ("offset", 1)):
        with pytest.raises(RequestError, match=f"session_params.{name} is not possible"):
            session.begin("c", [1], **{name: value})
    session.begin("c", [6])
    with pytest.raises(RequestError, match="has not ended"):
        session.begin("d", [7])


@pytest.mark.parametrize(
    ("new", "params", "words"),
    [
        ([1], {"after": "x"}, "the session has no turn 'x'"),
        ([1], {"after": "a", "offset": 4}, "offset must lie within the 3 tokens of 'a', got 4"),
        ([1], {"after": "a", "offset": -4}, "offset must lie within the 3 tokens of 'a', got -4"),
        ([1], {"rid": "a"}, "names a turn of this session already"),
        ([2] * 8, {"after": "a"}, "would have 11 tokens with those of the session, whose capacity_of_str_len is 10"),
    ],
)
def test_bad_turns(new: list[int], params: dict[str, Any], words: str) -> None:
    session = Conversation(capacity=10)
    session.turn("a", [2, 3], [4])
    with pytest.raises(RequestError, match=words):
        session.begin(**{"rid": "b", "new": new, **params})
    assert session.num_tokens == 3
    assert session.turn("b", [5], [], "a") == [2, 3, 4, 5]


def test_ids_are_taken_once() -> None:
    sessions = Sessions()
    name = sessions.open(10, "mine", appends_only=False, timeout_s=None)
    assert name == "mine"
    with pytest.raises(ValueError, match="'mine' is open already"):
        sessions.open(10, "mine", appends_only=False, timeout_s=None)
    assert sessions.open(10, None, appends_only=False, timeout_s=None) != sessions.open(
        10, None, appends_only=False, timeout_s=None
    )
