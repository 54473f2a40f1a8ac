"""load_lora_adapter: one more LoRA adapter, from a folder, while the server serves."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxserve.messages import SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class LoadLoRAAdapterReqInput(ControlStruct):
    """Reads a LoRA adapter in PEFT's format; requests can name it from then on.

    pinned: it keeps its place on the devices, and cannot be unloaded.
    """

    lora_name: str
    lora_path: str
    pinned: bool = False


class LoRAUpdateOutput(msgspec.Struct):
    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str] = msgspec.field(default_factory=dict)  # by name, their folders


class KnowsAdapters(Protocol):
    """The TokenizerManager's part."""

    lora_adapters: dict[str, str]


def check(manager: KnowsAdapters, request: LoadLoRAAdapterReqInput) -> LoRAUpdateOutput:
    check_new_name(manager, request.lora_name)
    return LoRAUpdateOutput(True)


def check_new_name(manager: KnowsAdapters, name: str) -> None:
    if not name or name != name.strip() or not name.isprintable():
        raise ControlError(f"lora_name must be printable characters without blanks at its ends; got {name!r}.")
    if name in manager.lora_adapters:
        raise ControlError(f"The LoRA adapter {name!r} is loaded already, from {manager.lora_adapters[name]}; unload it first.")


def load(scheduler: Scheduler, request: LoadLoRAAdapterReqInput) -> Generator[None, None, LoRAUpdateOutput]:
    yield from scheduler.adapters.load(request.lora_name, request.lora_path, request.pinned)
    return LoRAUpdateOutput(True, "", scheduler.adapters.loaded)


def about_adapter(request: Any) -> tuple[str, str]:
    """Of requests that load or unload one."""
    return "lora_adapter", request.lora_name


def note_loaded(manager: KnowsAdapters, request: LoadLoRAAdapterReqInput, replies: Sequence[LoRAUpdateOutput]) -> None:
    """Not what the replies list: of two requests at a time the first may be complete last."""
    manager.lora_adapters = {**manager.lora_adapters, request.lora_name: request.lora_path}


CONTROL = Control(
    name="load_lora_adapter",
    request=LoadLoRAAdapterReqInput,
    reply=LoRAUpdateOutput,
    handlers={TOKENIZER: check, SCHEDULER: load},
    route=Route("/load_lora_adapter"),
    takes_long=True,
    lasting="each",
    about=about_adapter,
    completed=note_loaded,
    has_async_method=True,
)
