"""unload_lora_adapter: a LoRA adapter goes, as soon as the requests that have it have ended."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from jaxserve.messages import SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route
from jaxserve.scheduler.control.load_lora_adapter import KnowsAdapters, LoRAUpdateOutput, about_adapter
from jaxserve.scheduler.control.load_lora_adapter_from_tensors import TakesAdapters

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class UnloadLoRAAdapterReqInput(ControlStruct):
    """Takes a LoRA adapter's name away at once. Answers when the requests that have it have ended and its memory is free."""

    lora_name: str


def check(manager: KnowsAdapters, request: UnloadLoRAAdapterReqInput) -> LoRAUpdateOutput:
    if request.lora_name not in manager.lora_adapters:
        raise ControlError(f"The LoRA adapter {request.lora_name!r} is not loaded.")
    return LoRAUpdateOutput(True)


def unload(scheduler: Scheduler, request: UnloadLoRAAdapterReqInput) -> Generator[None, None, LoRAUpdateOutput]:
    yield from scheduler.adapters.unload(request.lora_name)
    return LoRAUpdateOutput(True, "", scheduler.adapters.loaded)


def note_unloaded(manager: TakesAdapters, request: UnloadLoRAAdapterReqInput, replies: Sequence[LoRAUpdateOutput]) -> None:
    manager.given_adapters.remove(request.lora_name)
    manager.lora_adapters = {name: path for name, path in manager.lora_adapters.items() if name != request.lora_name}


CONTROL = Control(
    name="unload_lora_adapter",
    request=UnloadLoRAAdapterReqInput,
    reply=LoRAUpdateOutput,
    handlers={TOKENIZER: check, SCHEDULER: unload},
    route=Route("/unload_lora_adapter"),
    takes_long=True,
    lasting="each",
    about=about_adapter,
    completed=note_unloaded,
    has_async_method=True,
)
