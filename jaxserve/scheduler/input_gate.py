"""InputGate: holds generate requests back while input is blocked, in the order they came.

Unblocking takes two messages, for with several replicas none may let its requests go before all have been told: the first one
arrives (`unblock`), and when all replicas have said so the second one opens the gate (`release`). This is SGLang's barrier,
with the main process in the place of a barrier of all ranks. Until then new requests are held, too.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from jaxserve.messages import TokenizedGenerateReqInput


class _State(enum.Enum):
    OPEN = enum.auto()
    BLOCKED = enum.auto()
    UNBLOCKING = enum.auto()  # told to, and waits for the others


class InputGate:
    """What is taken out of it belongs to the caller: it is to be taken in as if it had just come."""

    def __init__(self) -> None:
        self._state = _State.OPEN
        self._held: dict[str, TokenizedGenerateReqInput] = {}  # by rid; of one sequence each

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    @property
    def is_blocked(self) -> bool:
        return self._state is not _State.OPEN

    def counts(self) -> dict[str, int]:
        return {"is_input_blocked": self.is_blocked, "num_blocked_reqs": len(self)}

    def block(self) -> None:
        """Also ends an unblocking that is not complete."""
        self._state = _State.BLOCKED

    def unblock(self) -> bool:
        """Whether it was blocked. Nothing goes on until `release`."""
        if self.is_blocked:
            self._state = _State.UNBLOCKING
        return self.is_blocked

    def release(self) -> list[TokenizedGenerateReqInput]:
        """All replicas have been told to unblock: what was held. Nothing if it was blocked again meanwhile."""
        return self.open() if self._state is _State.UNBLOCKING else []

    def open(self) -> list[TokenizedGenerateReqInput]:
        """Whatever the others do."""
        self._state = _State.OPEN
        return self._take(list(self._held))

    def hold(self, message: TokenizedGenerateReqInput) -> None:
        assert self.is_blocked and message.rid not in self._held, message.rid
        self._held[message.rid] = message

    def take(self, rids: Sequence[str]) -> list[TokenizedGenerateReqInput]:
        """Those of them that are held, to end."""
        return self._take([rid for rid in rids if rid in self._held])

    def take_prefix(self, rid_prefix: str) -> list[TokenizedGenerateReqInput]:
        return self._take([rid for rid in self._held if rid.startswith(rid_prefix)])

    def _take(self, rids: list[str]) -> list[TokenizedGenerateReqInput]:
        return [self._held.pop(rid) for rid in rids]
