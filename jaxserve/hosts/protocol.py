"""What hosts say to each other.

Two connections of each follower to host 0. One is of a thread on either side, so that it is served while a device hangs:

    follower: Hello -> host 0: Welcome, or Ended          who is there, and whether they fit together
    follower: CommandDone, Failed     host 0: Ended       while they serve

The other carries what is to be run, in order and numbered: `StepMessage`. Host 0 reads nothing from there but one Joined of
each follower, when that is ready to run.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np

from jaxserve.commands import Command, ReadAdapter, ReplaceWeights
from jaxserve.hosts.fingerprint import adapter_fingerprint, fingerprint
from jaxserve.messages import Message, decoder, encode, pack, unpack
from jaxserve.runner import StepInput

_NUMBER_BYTES = 8
COMMANDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Command)}


class HostsError(Exception):
    """Hosts cannot run together, or one of them is lost; a sentence that names it."""


# --- the connection of the threads -----------------------------------------------------------------------------------------


class Hello(Message):
    """A follower says who it is. What must be the same everywhere is compared by host 0."""

    rank: int
    name: str  # of the machine, for people
    software: str  # versions
    options: dict[str, Any]  # those that all hosts must be given alike, as JSON has them
    weights: str  # `fingerprint` of the model's folder


class Welcome(Message):
    """All are there."""


class Ended(Message):
    """Host 0 ends, and so do all. "": it was asked to; else why, in a sentence."""

    reason: str


class CommandDone(Message):
    number: int
    error: str  # "": it is carried out


class Failed(Message):
    """A follower's last words, in a sentence."""

    error: str


class Tick(Message):
    """Nothing: that it could be sent says that the other side is there."""


FromFollower = Hello | CommandDone | Failed
FromLeader = Welcome | Ended | Tick


# --- the connection for what is to be run -----------------------------------------------------------------------------------


class Joined(Message):
    """This follower's runner is ready."""

    rank: int


class Forward(Message):
    step: StepInput


class ReadLogits(Message):
    """Of the newest step, which is not sampled yet."""

    lines: np.ndarray


class Sample(Message):
    """The newest step."""

    masks: np.ndarray | None = None
    changed_lines: np.ndarray | None = None  # with `changed_logits`, a LogitLines
    changed_logits: np.ndarray | None = None


class Execute(Message):
    """A command, and `CommandDone` with its number afterwards."""

    number: int
    kind: str
    body: msgspec.Raw
    weights: str  # `fingerprint` of what is to be loaded, as host 0 sees it; "" if nothing is

    @staticmethod
    def of(number: int, command: Command) -> Execute:
        return Execute(number=number, kind=type(command).__name__, body=pack(command), weights=weights_of(command))

    @property
    def command(self) -> Command:
        found: Command = unpack(self.body, COMMANDS[self.kind])
        return found


def weights_of(command: Command) -> str:
    """The `fingerprint` of what it loads from a folder that it names; "" if it loads nothing."""
    match command:
        case ReplaceWeights(model_path, load_format):
            return fingerprint(model_path, load_format)
        case ReadAdapter(_, path):
            return adapter_fingerprint(path)
    return ""


class Undo(Message):
    """The newest command failed elsewhere: back to what was before, if it was carried out here. Answered like a command."""

    number: int
    adapter_id: int | None = None  # the command was to read this adapter; then it need not be the newest


StepMessage = Forward | ReadLogits | Sample | Execute | Undo
_step_decoder = decoder(StepMessage)


def numbered(number: int, message: StepMessage) -> bytes:
    """A frame."""
    return number.to_bytes(_NUMBER_BYTES, "little") + encode(message)


def read_numbered(frame: bytes | memoryview, expected: int) -> StepMessage:
    """HostsError if another number stands there: something was lost on the way, and this host's state is not host 0's."""
    number = int.from_bytes(frame[:_NUMBER_BYTES], "little")
    if number != expected:
        raise HostsError(f"Message {number} of host 0 came where {expected} was to come: some were lost.")
    message: StepMessage = _step_decoder.decode(frame[_NUMBER_BYTES:])
    return message
