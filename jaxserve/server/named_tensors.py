"""A training program's arrays, as an Engine here or elsewhere takes them, become safetensors files: weights, LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save

from jaxserve.scheduler.control.load_lora_adapter import LoRAUpdateOutput
from jaxserve.scheduler.control.load_lora_adapter_from_tensors import LoadLoRAAdapterFromTensorsReqInput
from jaxserve.scheduler.control.update_weights_from_tensor import (
    TensorUpdateOutput,
    UpdateWeightsFromTensorReqInput,
    success_and_message,
)
from jaxserve.server.control.engine_methods import Controllable

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]


class TensorUpdateMethods:
    def update_weights_from_tensor(
        self: Controllable,
        named_tensors: NamedTensors,
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> tuple[bool, str]:
        """Replaces the weights that are given: tensors of PyTorch, NumPy or JAX, under the names of a Hugging Face checkpoint.
        They go to the server's processes over the host's memory; between `begin_weight_update` and `end_weight_update` they
        wait there, and are replaced all at once. Returns whether it was done, and what the server says.

        Raises ValueError for what cannot be sent: no arrays, a name that is given twice.
        """
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=as_files(named_tensors),
            load_format=load_format,
            flush_cache=flush_cache,
            abort_all_requests=abort_all_requests,
            weight_version=weight_version,
        )
        reply: TensorUpdateOutput = self.control(request)
        return success_and_message(reply)


class AdapterMethods:
    def load_lora_adapter_from_tensors(
        self: Controllable,
        lora_name: str,
        tensors: NamedTensors,
        config_dict: Mapping[str, Any] | Any,
        load_format: str | None = None,
        pinned: bool = False,
    ) -> LoRAUpdateOutput:
        """Loads a LoRA adapter that is given: tensors of PyTorch, NumPy or JAX under the names of PEFT's files
        (`peft.get_peft_model_state_dict`), and what adapter_config.json would hold, or a LoraConfig. Requests can name it from
        then on. pinned: it keeps its place on the devices, and cannot be unloaded.

        Raises ValueError for what cannot be sent, as `update_weights_from_tensor`, and RequestError for what is refused.
        """
        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=lora_name,
            config_dict=dict(config_dict if isinstance(config_dict, Mapping) else config_dict.to_dict()),
            serialized_tensors=as_file(tensors),
            load_format=load_format,
            pinned=pinned,
        )
        reply: LoRAUpdateOutput = self.control(request)
        return reply


def as_file(named_tensors: NamedTensors) -> bytes:
    """The one safetensors file of all. ValueError as of `as_files`, and unless there is one."""
    files = as_files(named_tensors)
    if len(files) != 1:
        raise ValueError("The tensors of an adapter must be all of PyTorch, or all of NumPy and JAX; and at least one.")
    return files[0]


def as_files(named_tensors: NamedTensors) -> list[bytes]:
    """safetensors files: one of PyTorch's tensors, one of other arrays. ValueError as above."""
    torch: dict[str, Any] = {}
    others: dict[str, np.ndarray] = {}
    for name, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
        if name in torch or name in others:
            raise ValueError(f"The tensor {name} is given twice.")
        if type(tensor).__module__.partition(".")[0] == "torch":
            # Of its own memory: safetensors refuses parts of one, as weights of fused layers are.
            torch[name] = tensor.detach().cpu().contiguous().clone()
        elif hasattr(tensor, "__array__"):
            others[name] = np.ascontiguousarray(tensor)
        else:
            raise ValueError(f"The tensor {name} is a {type(tensor).__name__}; it must be an array.")
    files = []
    if torch:
        from safetensors.torch import save as save_torch  # which imports PyTorch, as whoever has its tensors did

        files.append(save_torch(torch))
    if others:
        files.append(save(others))
    return files
