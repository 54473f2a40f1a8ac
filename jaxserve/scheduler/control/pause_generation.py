"""pause_generation: no further step until continue_generation. What becomes of the running requests is the `mode`.

As in SGLang, a second pause is no error: its mode is applied to what has become of the requests by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from jaxserve.messages import FRONT, SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route
from jaxserve.scheduler.pace import PauseMode

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class PauseGenerationReqInput(ControlStruct):
    """No further step until /continue_generation. New requests wait.

    abort: running and waiting requests end. retract: running requests go back to the queue and are computed again later, so
    that the cache can be flushed meanwhile. in_place: they keep their pages and go on where they stood.
    """

    mode: PauseMode = "abort"


class PauseGenerationReqOutput(msgspec.Struct):
    """No step is running any more."""

    message: str = "Generation paused successfully."
    status: str = "ok"


class Pausable(Protocol):
    """The TokenizerManager's part."""

    is_paused: bool

    def abort_unsent(self, rid_prefix: str) -> None: ...


def note_pause(manager: Pausable, request: PauseGenerationReqInput) -> PauseGenerationReqOutput:
    manager.is_paused = True
    if request.mode == "abort":
        manager.abort_unsent("")
    return PauseGenerationReqOutput()


def pause(scheduler: Scheduler, request: PauseGenerationReqInput) -> PauseGenerationReqOutput:
    scheduler.pause(request.mode)
    return PauseGenerationReqOutput()


CONTROL = Control(
    name="pause_generation",
    request=PauseGenerationReqInput,
    reply=PauseGenerationReqOutput,
    handlers={TOKENIZER: note_pause, FRONT: note_pause, SCHEDULER: pause},
    lasting="each",
    route=Route("/pause_generation"),
)
