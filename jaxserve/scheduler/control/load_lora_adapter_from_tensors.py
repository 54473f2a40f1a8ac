"""load_lora_adapter_from_tensors: one more LoRA adapter, in the request itself, as a safetensors file.

The TokenizerManager writes it into a folder of its own and asks load_lora_adapter with that. So an adapter that had to leave
the host's memory is read again, and a scheduler that is started again finds it. The folder goes when the adapter is unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from jaxserve.config import ServerArgs
from jaxserve.messages import TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route
from jaxserve.scheduler.control.given_adapters import GivenAdapters
from jaxserve.scheduler.control.load_lora_adapter import (
    KnowsAdapters,
    LoadLoRAAdapterReqInput,
    LoRAUpdateOutput,
    check_new_name,
)
from jaxserve.scheduler.control.tensor_files import check_is_no_pickle, check_load_format


class LoadLoRAAdapterFromTensorsReqInput(ControlStruct):
    """Takes a LoRA adapter in PEFT's format out of the request; requests can name it from then on.

    config_dict: what adapter_config.json would hold. serialized_tensors: what adapter_model.safetensors would, in base64;
    nothing is unpickled. pinned: it keeps its place on the devices, and cannot be unloaded.
    """

    lora_name: str
    config_dict: dict[str, Any]
    serialized_tensors: bytes
    load_format: str | None = None
    pinned: bool = False
    added_tokens_config: dict[str, Any] | None = None


class TakesAdapters(KnowsAdapters, Protocol):
    """The TokenizerManager's part."""

    args: ServerArgs
    given_adapters: GivenAdapters


def check(manager: TakesAdapters, request: LoadLoRAAdapterFromTensorsReqInput) -> LoRAUpdateOutput:
    check_new_name(manager, request.lora_name)
    check_load_format(request.load_format)
    check_is_no_pickle("serialized_tensors", request.serialized_tensors)
    if request.added_tokens_config:
        raise ControlError("added_tokens_config must be null: an adapter cannot bring tokens of its own.")
    if manager.args.nnodes > 1:
        raise ControlError("LoRA adapters must come by load_lora_adapter with --nnodes above 1.")
    return LoRAUpdateOutput(True)


@contextlib.asynccontextmanager
async def from_folder(
    manager: TakesAdapters, request: LoadLoRAAdapterFromTensorsReqInput
) -> AsyncIterator[LoadLoRAAdapterReqInput]:
    """The request that loads it from a folder, which stays if it is loaded."""
    name = request.lora_name
    given = manager.given_adapters.add(name)
    if given is None:
        raise ControlError(f"The LoRA adapter {name!r} is being loaded.")
    try:
        await asyncio.to_thread(given.write, request.config_dict, request.serialized_tensors)
        yield LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(given.folder), pinned=request.pinned)
    except OSError as error:
        raise ControlError(f"The LoRA adapter {name!r} needs room in {given.folder}: {error.strerror}.", 500) from error
    finally:
        if manager.lora_adapters.get(name) != str(given.folder):
            manager.given_adapters.remove(name)


CONTROL = Control(
    name="load_lora_adapter_from_tensors",
    request=LoadLoRAAdapterFromTensorsReqInput,
    reply=LoRAUpdateOutput,
    handlers={TOKENIZER: check},
    route=Route("/load_lora_adapter_from_tensors"),
    asked_as=from_folder,
    has_method=False,  # the Engine's makes a file of arrays first
)
