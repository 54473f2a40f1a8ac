"""Responses that are kept in memory, to be asked for and to be gone on with. Within bounds: those used least recently go first.

Responses that run in the background are in here, too, from their beginning; they do not go before they have ended.

Each front process has a store of its own, and its share of the bounds. Ids there say whose they are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from jaxserve.server.elsewhere import AnsweredElsewhere, Place
from jaxserve.server.requests import ERR_TYPES, RequestError, new_rid

# Of all that are kept; conversations are long, and each response holds its whole.
MOST_BYTES = 256 * 1024 * 1024
ID_PREFIX = "resp_"


class Kept(NamedTuple):
    """Both as JSON: objects would take many times the memory."""

    response: bytes
    items: bytes | None  # the conversation; None: it has not ended
    task: asyncio.Task[None] | None = None  # that it runs in

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items or b"")


class ResponseStore:
    def __init__(self, most_responses: int, place: Place | None = None) -> None:
        """`most_responses` of all front processes together. `place`: which of them this is; None: there are none."""
        self._place = place
        self._num_shares = 1 if place is None else place.num_fronts
        self._most_responses = -(-most_responses // self._num_shares)
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def _most_bytes(self) -> int:
        return MOST_BYTES // self._num_shares

    def new_id(self) -> str:
        return f"{ID_PREFIX}{new_rid()}" if self._place is None else f"{ID_PREFIX}{self._place.front}_{new_rid()}"

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str, param: str | None = None) -> Kept:
        """Raises RequestError if it is not kept, or could never be; AnsweredElsewhere if another process keeps it."""
        if not response_id.startswith(ID_PREFIX):
            message = f"{response_id!r} is not the id of a response: those begin with {ID_PREFIX}."
            raise RequestError(message, param=param or "response_id")
        self._check_owner(response_id)
        kept = self._kept.get(response_id)
        if kept is None:
            message = f"There is no response {response_id!r}: it never was, was not stored, or is no longer kept."
            raise RequestError(message, 404, "NotFoundError", param=param, code="response_not_found")
        self._kept.move_to_end(response_id)
        return kept

    def _check_owner(self, response_id: str) -> None:
        if self._place is None:
            return
        front, separator, _ = response_id.removeprefix(ID_PREFIX).partition("_")
        if not separator or not (front.isascii() and front.isdecimal()):
            return
        owner = int(front)
        if owner != self._place.front and owner < self._place.num_fronts:
            raise AnsweredElsewhere(owner)

    def put(self, response_id: str, kept: Kept) -> None:
        """Also in place of what was kept by that id."""
        self.drop(response_id)
        if not self.is_open or kept.num_bytes > self._most_bytes:
            return
        self._kept[response_id] = kept
        self._num_bytes += kept.num_bytes
        while len(self._kept) > self._most_responses or self._num_bytes > self._most_bytes:
            oldest = next((name for name, each in self._kept.items() if each.task is None), None)
            if oldest is None:
                return
            self.drop(oldest)

    @property
    def is_open(self) -> bool:
        return self._most_responses > 0

    def check_room(self) -> None:
        """For one more that runs in the background. Raises RequestError."""
        if not self.is_open:
            message = "background needs the store, which this server does not have (--max-stored-responses 0)."
            raise RequestError(message, param="background")
        num_running = sum(kept.task is not None for kept in self._kept.values())
        if num_running >= self._most_responses:
            message = f"{num_running} responses run in the background, the most that may (--max-stored-responses)."
            raise RequestError(message, 503, ERR_TYPES[503], param="background")

    def drop(self, response_id: str) -> None:
        if (kept := self._kept.pop(response_id, None)) is not None:
            self._num_bytes -= kept.num_bytes
