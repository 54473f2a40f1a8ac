"""Sessions: conversations whose tokens the server keeps, so that a request brings only what is new.

A session is a tree of turns, named by their requests' rids; a turn is the tokens it brought and those it generated, behind some
of the tokens of the turn before it. What a turn's prompt is follows from that and from its SessionParams. Pages are not held:
the prefix cache has a session's tokens like any others', as long as there is room.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable

import numpy as np

from jaxserve.server.requests import RequestError, SessionParams
from jaxserve.types import FinishReason

_MOST_SESSIONS = 1 << 14
_MOST_TOKENS = 1 << 26  # of all sessions: 256 MiB
_NO_TOKENS = np.zeros(0, np.int32)


@dataclasses.dataclass(eq=False, slots=True)
class Turn:
    """One request of a session."""

    rid: str
    session: Session
    before: Turn | None  # what it goes on from, if anything
    num_kept: int  # tokens of that
    new_ids: np.ndarray  # int32: what it brought
    output_ids: np.ndarray = dataclasses.field(default_factory=lambda: _NO_TOKENS)  # int32, once it has ended
    children: list[Turn] = dataclasses.field(default_factory=list)
    has_ended: bool = False
    _outputs: list[int] = dataclasses.field(default_factory=list)  # until then

    @property
    def prompt_len(self) -> int:
        return self.num_kept + len(self.new_ids)

    @property
    def length(self) -> int:
        return self.prompt_len + len(self.output_ids)

    def prompt_ids(self) -> np.ndarray:
        """int32 [prompt_len]."""
        return self._first(self.prompt_len)

    def take_in(self, token_ids: list[int], reason: FinishReason | None) -> None:
        """New outputs, with the last of them the reason of the end."""
        if self.has_ended:
            return  # it was stopped
        self._outputs.extend(token_ids)
        if reason is None:
            return
        if reason.type == "abort" and reason.status_code is not None and not self._outputs:
            self.discard()  # it was refused
            return
        self.stop()

    def stop(self) -> None:
        """It ends with what it has."""
        self.output_ids, self._outputs = np.array(self._outputs, np.int32), []
        self.has_ended = True
        self.session.turn_ended(self)

    def discard(self) -> None:
        """As if it had never been asked for."""
        self.has_ended = True
        self.session.remove(self)
        if self.before is not None and self in self.before.children:
            self.before.children.remove(self)

    def _first(self, count: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        turn: Turn | None = self
        while turn is not None and count:
            own = np.concatenate([turn.new_ids, turn.output_ids])
            parts.append(own[: max(count - turn.num_kept, 0)])
            count = min(count, turn.num_kept)
            turn = turn.before
        return np.concatenate(parts[::-1]) if parts else _NO_TOKENS


class Session:
    def __init__(
        self, capacity: int, timeout_s: float | None, *, appends_only: bool, clock: Callable[[], float], count: _Count
    ) -> None:
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._appends_only = appends_only
        self._clock = clock
        self._count = count
        self._last_active_s = clock()
        self._turns: dict[str, Turn] = {}
        self._newest: Turn | None = None
        self.rank: int | None = None  # of the replica that its newest turn went to, and that has its tokens in its cache

    @property
    def is_expired(self) -> bool:
        if self._timeout_s is None or self._clock() - self._last_active_s <= self._timeout_s:
            return False
        return all(turn.has_ended for turn in self._turns.values())

    def begin(self, params: SessionParams, rid: str, new_ids: np.ndarray, bos_token_id: int | None) -> tuple[Turn, list[str]]:
        """A turn, and the rids of the running ones that it replaces. Raises RequestError."""
        self._last_active_s = self._clock()
        if rid in self._turns:
            raise _wrong(f"The rid {rid!r} names a turn of this session already.", "rid")
        before = self._newest_turn(params) if self._appends_only else self._named_turn(params)
        replaced = self._replace(before) if params.replace else []
        if before is not None and not before.has_ended:
            raise _wrong(f"The turn {before.rid!r} has not ended yet.")
        kept = self._num_kept(before, params)
        if before is not None and len(new_ids) and new_ids[0] == bos_token_id:
            new_ids = new_ids[1:]
        turn = Turn(rid, self, before, kept, new_ids)
        if turn.prompt_len > self._capacity:
            raise _wrong(
                f"The prompt would have {turn.prompt_len} tokens with those of the session, whose capacity_of_str_len is "
                f"{self._capacity}."
            )
        self._count.add(len(new_ids))
        self._turns[rid] = self._newest = turn
        if before is not None:
            before.children.append(turn)
        return turn, replaced

    def close(self) -> None:
        for turn in self._turns.values():
            self._count.add(-len(turn.new_ids) - len(turn.output_ids))
        self._turns.clear()
        self._newest = None

    def turn_ended(self, turn: Turn) -> None:
        self._last_active_s = self._clock()
        if self._turns.get(turn.rid) is turn:
            self._count.add(len(turn.output_ids))

    def remove(self, turn: Turn) -> None:
        if self._turns.get(turn.rid) is not turn:
            return  # the session is closed, or the turn was replaced
        del self._turns[turn.rid]
        self._count.add(-len(turn.new_ids) - len(turn.output_ids))
        if self._newest is turn:
            self._newest = turn.before

    def _newest_turn(self, params: SessionParams) -> Turn | None:
        for name in ("replace", "drop_previous_output", "offset"):
            if getattr(params, name):
                raise _wrong(f"session_params.{name} is not possible in a streaming session: its turns are only appended.")
        return self._newest

    def _named_turn(self, params: SessionParams) -> Turn | None:
        if params.rid is None:
            return None
        turn = self._turns.get(params.rid)
        if turn is None:
            raise _wrong(f"session_params.rid: the session has no turn {params.rid!r}.")
        return turn

    def _replace(self, before: Turn | None) -> list[str]:
        """Drops what follows a turn, or everything. Returns the rids of those that run, that turn's among them."""
        dropped = list(self._turns.values()) if before is None else _descendants(before)
        stopped = [turn for turn in (*dropped, before) if turn is not None and not turn.has_ended]
        for turn in stopped:
            turn.stop()
        for turn in dropped:
            self.remove(turn)
        if before is not None:
            before.children.clear()
        return [turn.rid for turn in stopped]

    @staticmethod
    def _num_kept(before: Turn | None, params: SessionParams) -> int:
        """Tokens of the turn before that the prompt begins with."""
        if before is None:
            return 0
        length = before.prompt_len if params.drop_previous_output else before.length
        offset = params.offset or 0  # 0 is none, as in SGLang
        if not -length <= offset <= length:
            raise _wrong(f"session_params.offset must lie within the {length} tokens of {before.rid!r}, got {offset}.")
        return length if not offset else offset % length if offset < 0 else offset


@dataclasses.dataclass
class _Count:
    """Tokens of all sessions."""

    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.tokens += tokens


class Sessions:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = _Count()
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_tokens(self) -> int:
        return self._count.tokens

    def open(self, capacity: int, session_id: str | None, *, appends_only: bool, timeout_s: float | None) -> str:
        """Returns its id. Raises ValueError with a sentence."""
        self._close_expired()
        if session_id in self._sessions:
            raise ValueError(f"The session {session_id!r} is open already.")
        if len(self._sessions) >= _MOST_SESSIONS:
            raise ValueError(f"{_MOST_SESSIONS} sessions are open; close one first.")
        session_id = session_id or uuid.uuid4().hex
        session = Session(capacity, timeout_s, appends_only=appends_only, clock=self._clock, count=self._count)
        self._sessions[session_id] = session
        return session_id

    def close(self, session_id: str) -> None:
        """Its requests go on to their end. Raises ValueError with a sentence."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise ValueError(f"There is no session {session_id!r}; it may have been closed or timed out.")
        session.close()

    def begin(self, params: SessionParams, rid: str, new_ids: np.ndarray, bos_token_id: int | None) -> tuple[Turn, list[str]]:
        """See Session.begin."""
        self._close_expired()
        session = self._sessions.get(params.id)
        if session is None:
            raise _wrong(f"There is no session {params.id!r}; open one with /open_session.")
        if self._count.tokens + len(new_ids) > _MOST_TOKENS:
            raise RequestError(f"All sessions together hold {_MOST_TOKENS} tokens; close some.", 503, "ServiceUnavailableError")
        return session.begin(params, rid, new_ids, bos_token_id)

    def _close_expired(self) -> None:
        for session_id in [name for name, session in self._sessions.items() if session.is_expired]:
            self.close(session_id)


def _descendants(turn: Turn) -> list[Turn]:
    found, open_turns = [], list(turn.children)
    while open_turns:
        found.append(open_turns.pop())
        open_turns.extend(found[-1].children)
    return found


def _wrong(message: str, param: str = "session_params") -> RequestError:
    return RequestError(message, param=param)
