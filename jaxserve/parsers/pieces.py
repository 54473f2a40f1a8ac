"""Pieces of a message, in the order in which the model writes them. Every protocol's reply is made of these."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    text: str  # never empty


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    text: str  # never empty


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins; its arguments follow, whole or in pieces."""

    call: int  # counts the message's calls from 0
    name: str
    id: str | None = None  # where the model gives one


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """The texts of one call, joined, are the call's arguments as a JSON object."""

    call: int
    text: str  # never empty


Piece = Reasoning | Content | CallBegin | CallArguments
