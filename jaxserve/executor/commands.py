"""CommandThread: carries out what `Runner.execute` is given, one command after the other, in a thread of its own.

The thread waits for disks and devices while the scheduler goes on answering. No step runs meanwhile (the contract of
`execute`), so what a command changes is changed by nobody else. Whatever can fail is done before anything is given up, or there
is a way back.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from jaxserve.commands import (
    CheckTensors,
    CheckWeights,
    Command,
    CommandError,
    DumpExpertRecord,
    ForgetAdapter,
    ForgetTensors,
    MemoryTag,
    PullTensors,
    ReadAdapter,
    ReadTensors,
    ReleaseMemory,
    ReplaceTensors,
    ReplaceWeights,
    ResumeMemory,
    StartExpertRecord,
    StartProfile,
    StopExpertRecord,
    StopProfile,
    WeightsLost,
)
from jaxserve.executor import profiling
from jaxserve.executor.adapter_store import AdapterStore
from jaxserve.executor.compile_counter import in_context
from jaxserve.executor.expert_record import ExpertRecord
from jaxserve.executor.pulled_tensors import pull
from jaxserve.executor.step import Params
from jaxserve.executor.weights import WeightLoader, delete
from jaxserve.handover import Handover
from jaxserve.host_memory import give_back_memory
from jaxserve.models.given_tensors import GivenTensor
from jaxserve.models.safetensors_files import tensors_in

logger = logging.getLogger(__name__)

_LOST = "The old weights are partly replaced and gone: replace all of them, or load them (resume_memory_occupation)."


class DeviceContents(Protocol):
    """What a runner keeps on its devices and commands change. None: released."""

    params: tuple[Params, ...] | None  # of each stage
    kv_pool: tuple[Any, ...] | None

    @property
    def expert_counts(self) -> np.ndarray | None:
        """uint32 [layers with experts, experts]: how many tokens went to each expert; None if they are not counted at all."""
        ...

    def empty_kv_pool(self) -> tuple[Any, ...]:
        """A new one. Nothing is compiled for it."""
        ...


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Of one array, by their place in it."""

    by_index: dict[str, np.ndarray]


class CommandThread:
    def __init__(
        self,
        contents: DeviceContents,
        loader: WeightLoader,
        model_path: str,
        load_format: str,
        expert_record: ExpertRecord,
        adapters: AdapterStore | None,
        handover: Handover | None = None,
    ) -> None:
        """`model_path` and `load_format` say where the weights are from; `handover` is where arrays for them are left."""
        self._contents = contents
        self._loader = loader
        self._source = (model_path, load_format)
        self._expert_record = expert_record
        self._adapters = adapters
        self._handover = handover
        self._read: dict[str, GivenTensor] = {}
        self._thread = ThreadPoolExecutor(1, "runner-commands")

    def start(self, command: Command) -> Future[None]:
        return self._thread.submit(in_context(self._carry_out), command)

    def close(self) -> None:
        """Ends the thread, behind the command that it carries out."""
        self._thread.shutdown(cancel_futures=True)

    def _carry_out(self, command: Command) -> None:
        started_s = time.monotonic()
        failure = ""
        try:
            self._dispatch(command)
        except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
            failure = _sentence(error)
        if failure:
            raise CommandError(failure)
        logger.info("%s: done in %.2f s", command, time.monotonic() - started_s)

    def _dispatch(self, command: Command) -> None:
        match command:
            case CheckWeights(model_path, load_format):
                self._loader.check(model_path, load_format)
            case ReplaceWeights(model_path, load_format):
                self._replace_weights(model_path, load_format)
            case ReadTensors(files):
                self._keep(itertools.chain.from_iterable(tensors_in(data).items() for data in files))
            case PullTensors():
                self._keep(pull(command))
            case ForgetTensors():
                self._read.clear()
            case CheckTensors(number, partial):
                self._loader.check_tensors(self._contents.params, self._given(number), partial=partial)
            case ReplaceTensors(number, partial):
                self._replace_tensors(self._given(number), partial=partial)
            case ReleaseMemory(tags):
                self._release(tags)
            case ResumeMemory(tags):
                self._resume(tags)
            case StartProfile():
                profiling.start(command)
            case StopProfile():
                profiling.stop(command)
            case StartExpertRecord() | StopExpertRecord() | DumpExpertRecord():
                self._expert_record.carry_out(command, self._contents.expert_counts)
            case ReadAdapter(adapter_id, path):
                self._store.read(adapter_id, path)
            case ForgetAdapter(adapter_id):
                self._store.forget(adapter_id)

    @property
    def _store(self) -> AdapterStore:
        if self._adapters is None:
            raise ValueError("LoRA adapters need a server that runs with --enable-lora.")
        return self._adapters

    def _given(self, number: int | None) -> Mapping[str, GivenTensor]:
        if number is None:
            return self._read
        if self._handover is None:
            raise ValueError("Weights as arrays must be in the engine's own process (in_process=True).")
        given: Mapping[str, GivenTensor] = self._handover.peek(number)
        return given

    def _keep(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """All of them or none."""
        read: dict[str, GivenTensor] = {}
        for name, array in tensors:
            if name in read or name in self._read:
                raise ValueError(f"The tensor {name} is given twice.")
            read[name] = GivenTensor(array)
        self._read |= read

    def _replace_tensors(self, given: Mapping[str, GivenTensor], *, partial: bool) -> None:
        contents = self._contents
        self._loader.check_tensors(contents.params, given, partial=partial)
        old, contents.params = contents.params, None
        failure = ""
        try:
            contents.params = self._loader.replace_tensors(old, given)
        except Exception as error:
            failure = _sentence(error)
        if failure:  # the exception is gone by now, and with it what its traceback held
            gc.collect()
            raise CommandError(failure) if old is None else WeightsLost(f"{failure} {_LOST}")

    def _replace_weights(self, model_path: str, load_format: str) -> None:
        self._loader.check(model_path, load_format)
        old = self._contents.params
        if old is not None and not self._loader.fits_on_host(old):
            raise CommandError(
                "The host's memory has no room for a second set of weights, to keep the old ones until the new ones are there. "
                'Release the weights first (release_memory_occupation, tags ["weights"]).'
            )
        way_back = None if old is None or self._loader.loads_beside else _move_to_host(old)
        failure = ""
        try:
            self._contents.params = self._loader.load(model_path, load_format)
        except Exception as error:
            failure = _sentence(error)
        if failure:  # the exception is gone by now, and with it what its traceback held
            gc.collect()
            if way_back is not None:
                self._contents.params = jax.block_until_ready(_move_back(*way_back))
            raise CommandError(f"{failure} The weights are still the old ones." if old is not None else failure)
        self._source = (model_path, load_format)
        if way_back is None:
            delete(old)

    def _release(self, tags: tuple[MemoryTag, ...]) -> None:
        contents = self._contents
        for tag in tags:
            if self._is_released(tag):
                raise CommandError(f"{tag} is released already.")
        if "kv_cache" in tags:
            delete(contents.kv_pool)
            contents.kv_pool = None
        if "weights" in tags:
            delete(contents.params)
            contents.params = None
        give_back_memory()  # of CPU devices, whose memory the C library would keep

    def _resume(self, tags: tuple[MemoryTag, ...]) -> None:
        contents = self._contents
        for tag in tags:
            if not self._is_released(tag):
                raise CommandError(f"{tag} is not released.")
        params = self._loader.load(*self._source) if "weights" in tags else contents.params
        kv_pool = jax.block_until_ready(contents.empty_kv_pool()) if "kv_cache" in tags else contents.kv_pool
        contents.params, contents.kv_pool = params, kv_pool

    def _is_released(self, tag: MemoryTag) -> bool:
        return (self._contents.params if tag == "weights" else self._contents.kv_pool) is None


def _move_to_host(params: tuple[Params, ...]) -> tuple[Any, Any]:
    """Copies of this host's parts of the arrays, which are deleted; the arrays' shapes and shardings."""
    copies = jax.tree.map(_parts, params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    delete(params)
    return copies, shapes


def _parts(array: jax.Array) -> _Parts:
    """Parts that several devices hold alike are copied once."""
    parts: dict[str, np.ndarray] = {}
    for shard in array.addressable_shards:
        if str(shard.index) not in parts:
            parts[str(shard.index)] = np.array(shard.data)
    return _Parts(parts)


def _move_back(copies: Any, shapes: Any) -> tuple[Params, ...]:
    def make(parts: _Parts, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: parts.by_index[str(index)])

    params: tuple[Params, ...] = jax.tree.map(make, copies, shapes)
    return params


def _sentence(error: Exception) -> str:
    """JAX's errors go on for lines about where memory went."""
    text = str(error).strip() or type(error).__name__
    return text.split("\n")[0] if isinstance(error, jax.errors.JaxRuntimeError) else text
