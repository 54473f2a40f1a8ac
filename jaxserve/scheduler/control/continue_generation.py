"""continue_generation: the end of a pause. As in SGLang it is no error if there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from jaxserve.messages import SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route
from jaxserve.scheduler.control.pause_generation import Pausable

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class ContinueGenerationReqInput(ControlStruct):
    """Ends a pause: requests that waited or were held go on."""

    torch_empty_cache: bool = True  # SGLang's clients may send it; there is no allocator here that it could mean


class ContinueGenerationReqOutput(msgspec.Struct):
    message: str = "Generation continued successfully."
    status: str = "ok"


def note_end(manager: Pausable, request: ContinueGenerationReqInput) -> ContinueGenerationReqOutput:
    manager.is_paused = False
    return ContinueGenerationReqOutput()


def resume(scheduler: Scheduler, request: ContinueGenerationReqInput) -> ContinueGenerationReqOutput:
    was_paused = scheduler.resume()
    return ContinueGenerationReqOutput() if was_paused else ContinueGenerationReqOutput("Generation was not paused.")


CONTROL = Control(
    name="continue_generation",
    request=ContinueGenerationReqInput,
    reply=ContinueGenerationReqOutput,
    handlers={TOKENIZER: note_end, SCHEDULER: resume},
    lasting="each",
    route=Route("/continue_generation"),
)
