"""The commands that a Runner can be given between steps, or beside them: data, of which a scheduler makes what it sends."""

from __future__ import annotations

import dataclasses
from typing import Literal

MemoryTag = Literal["kv_cache", "weights"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")


@dataclasses.dataclass(frozen=True)
class CheckWeights:
    """Whether `ReplaceWeights` of this folder would be refused for what stands in its files. Changes nothing."""

    model_path: str
    load_format: str


@dataclasses.dataclass(frozen=True)
class ReplaceWeights:
    """Other weights of the same model, from a folder. The pool's contents stay, and are those of the old weights."""

    model_path: str
    load_format: str


@dataclasses.dataclass(frozen=True)
class ReadTensors:
    """Keeps tensors in the host's memory, beside those that were read before, for the next `ReplaceTensors`. Refused if they
    cannot be read, or one is there already: then none of them is kept."""

    files: tuple[bytes, ...] = dataclasses.field(repr=False)  # each as a safetensors file


@dataclasses.dataclass(frozen=True)
class OfferedTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PullTensors:
    """As `ReadTensors`, of arrays that another process offers: jax.experimental.transfer."""

    address: str  # of its transfer server
    uuid: int  # that of the offer, which is used up
    tensors: tuple[OfferedTensor, ...] = dataclasses.field(repr=False)  # in its order
    timeout_s: float  # so long they may take to come


@dataclasses.dataclass(frozen=True)
class ForgetTensors:
    """The memory of what was read is free again."""


@dataclasses.dataclass(frozen=True)
class CheckTensors:
    """Whether `ReplaceTensors` of these would be refused for their names, shapes or types. Changes nothing, and leaves them
    where they are."""

    # Number of a mapping, tensor -> models' GivenTensor, that was left in the runner's Handover; None: what was read.
    handover: int | None
    partial: bool  # not all of the model's tensors need be there


@dataclasses.dataclass(frozen=True)
class ReplaceTensors:
    """Other weights of the same model, from arrays on devices of this process, or in the host's memory. With `partial`, tensors
    that are not given stay. The pool's contents stay, as with `ReplaceWeights`.

    Leaves them where they are, as other replicas want those of the Handover too. It writes over the old weights as it goes: a
    failure on the way is a `WeightsLost`.
    """

    handover: int | None
    partial: bool


@dataclasses.dataclass(frozen=True)
class ReleaseMemory:
    """Gives the memory of the named parts back to the devices, and their contents up."""

    tags: tuple[MemoryTag, ...]


@dataclasses.dataclass(frozen=True)
class ResumeMemory:
    """Takes the memory of released parts again: an empty pool; the weights from the folder they came from last."""

    tags: tuple[MemoryTag, ...]


@dataclasses.dataclass(frozen=True)
class StartProfile:
    """Begins a trace of the devices, and of what the host says that it does (`Runner.annotate`). One at a time."""

    folder: str  # where it goes once it is complete
    traces_host: bool = True
    traces_python: bool = False  # every call of a Python function, which slows the host down


@dataclasses.dataclass(frozen=True)
class StopProfile:
    """Completes the trace: an .xplane.pb and a .trace.json.gz."""

    memory_file: str | None = None  # for what the devices' memory holds now


@dataclasses.dataclass(frozen=True)
class StartExpertRecord:
    """From now on, counts how many tokens go to each expert. What was counted before is forgotten."""


@dataclasses.dataclass(frozen=True)
class StopExpertRecord:
    """Counts no further."""


@dataclasses.dataclass(frozen=True)
class DumpExpertRecord:
    """Writes what was counted, as JSON, and forgets it."""

    file: str


@dataclasses.dataclass(frozen=True)
class ReadAdapter:
    """Reads a LoRA adapter in PEFT's format into the host's memory, for `AdapterLoad`. Refused if it is not for this model or
    has no room in a slot."""

    adapter_id: int  # never given before
    path: str  # its folder


@dataclasses.dataclass(frozen=True)
class ForgetAdapter:
    """The host's memory of it is free again. What is in slots stays there."""

    adapter_id: int


ExpertRecordCommand = StartExpertRecord | StopExpertRecord | DumpExpertRecord
AdapterCommand = ReadAdapter | ForgetAdapter
Command = (
    CheckWeights
    | ReplaceWeights
    | ReadTensors
    | PullTensors
    | ForgetTensors
    | CheckTensors
    | ReplaceTensors
    | ReleaseMemory
    | ResumeMemory
    | StartProfile
    | StopProfile
    | ExpertRecordCommand
    | AdapterCommand
)
# These may run beside steps; the others stand between them.
BesideSteps = (
    CheckWeights | ReadTensors | PullTensors | ForgetTensors | CheckTensors | StartProfile | StopProfile | AdapterCommand
)


class CommandError(Exception):
    """A command that cannot be carried out, in a sentence. Nothing was changed, or it is a `WeightsLost`."""


class WeightsLost(CommandError):  # noqa: N818
    """Weights were to be replaced, and neither the old nor the new ones are there now: as after ReleaseMemory(("weights",))."""
