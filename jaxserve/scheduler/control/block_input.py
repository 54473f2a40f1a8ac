"""block_input: new requests are accepted and held until unblock_input. As in SGLang, those that run go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from jaxserve.messages import SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class BlockInputReqInput(ControlStruct):
    """Holds new requests, in order, until /unblock_input. Those that have come before go on; an abort reaches both."""


class BlockInputReqOutput(msgspec.Struct):
    message: str = "Input blocked successfully."
    status: str = "ok"


class Blockable(Protocol):
    """The TokenizerManager's part."""

    is_input_blocked: bool


def note_block(manager: Blockable, request: BlockInputReqInput) -> BlockInputReqOutput:
    manager.is_input_blocked = True
    return BlockInputReqOutput()


def block(scheduler: Scheduler, request: BlockInputReqInput) -> BlockInputReqOutput:
    scheduler.input_gate.block()
    return BlockInputReqOutput()


CONTROL = Control(
    name="block_input",
    request=BlockInputReqInput,
    reply=BlockInputReqOutput,
    handlers={TOKENIZER: note_block, SCHEDULER: block},
    lasting="each",
    route=Route("/block_input"),
)
