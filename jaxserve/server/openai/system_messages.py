"""Where system messages stand that agents send amid a conversation, or several at its beginning: not every template takes them.

Those at the beginning become one. Later ones stay where the template has a place for them; elsewhere they are part of the
user's turn, so that the prefix of the conversation stays what it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxserve.server.http.service import GenerationService
from jaxserve.server.requests import RequestError

_Message = dict[str, Any]

_ROLES = ("system", "developer")
_MARKER = "inlinesystem"
_TRIAL = [{"role": "user", "content": "a"}, {"role": "system", "content": _MARKER}]


def placed(messages: Iterable[_Message], takes_inline: Callable[[], bool]) -> list[_Message]:
    """The contents of messages are texts."""
    given = list(messages)
    first = list(itertools.takewhile(_is_system, given))
    later = given[len(first) :]
    if any(map(_is_system, later)) and not takes_inline():
        later = list(_in_users_turns(later))
    texts = [message["content"] for message in first if message["content"]]
    # A conversation of nothing else has a message all the same.
    return [*([{"role": "system", "content": "\n".join(texts)}] if texts or not later else []), *later]


def _is_system(message: _Message) -> bool:
    return message["role"] in _ROLES


def _in_users_turns(messages: list[_Message]) -> Iterator[_Message]:
    """A turn goes on through system messages, and through what the user says next to them."""
    for is_users, group in itertools.groupby(messages, lambda message: _is_system(message) or message["role"] == "user"):
        turn = list(group)
        if is_users and any(map(_is_system, turn)):
            yield {"role": "user", "content": "\n".join(message["content"] for message in turn)}
        else:
            yield from turn


class InlineSystem:
    """Whether the template renders a system message after others, found out by trying once: some refuse it, some omit it."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._is_rendered: bool | None = None

    def is_rendered(self) -> bool:
        """From any thread. Raises RequestError while the server is starting."""
        if self._is_rendered is None:
            try:
                ids = self._service.apply_chat_template(_TRIAL)
            except RequestError as error:
                if error.status_code != 400:
                    raise
                self._is_rendered = False
            else:
                self._is_rendered = _MARKER in self._service.decode(ids, False)
        return self._is_rendered
