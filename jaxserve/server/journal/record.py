"""One request while it is served: what came, and what has been answered so far.

A sink before the request's own, so it sees each chunk. Requests that nobody wants to know of have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxserve.server.native.replies import meta_info
from jaxserve.server.requests import GenerateReqInput, GenerationChunk
from jaxserve.server.sinks import ChunkSink


@dataclasses.dataclass(slots=True)
class Output:
    """What a sequence has answered."""

    index: int  # in its request
    rid: str
    texts: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)  # meta_info of its last chunk
    size: int = 0  # characters and tokens

    def add(self, chunk: GenerationChunk, weight_version: str) -> None:
        # At once: whoever gets the chunk next may merge others into it.
        self.texts.append(chunk.text)
        num_before = len(self.token_ids)
        self.token_ids.extend(chunk.token_ids)
        for part in chunk.parts:
            self.token_ids.extend(part.token_ids.tolist())
        self.size += len(chunk.text) + len(self.token_ids) - num_before
        if chunk.finish_reason is not None:
            self.meta = meta_info(chunk, weight_version)

    def to_dict(self) -> dict[str, Any]:
        return {"text": "".join(self.texts), "output_ids": self.token_ids, "meta_info": self.meta}


class RequestRecord:
    def __init__(
        self,
        req: GenerateReqInput,
        rids: Sequence[str],
        received_s: float,
        sink: ChunkSink,
        ended: Callable[[RequestRecord, Output], None],
        weight_version: str,
    ) -> None:
        """`rids`: of the sequences. `ended` is told of each sequence that ends."""
        self.req = req
        self.received_s = received_s  # Unix time
        self.outputs = [Output(index, rid) for index, rid in enumerate(rids)]
        self._sink = sink
        self._ended = ended
        self._weight_version = weight_version

    def push(self, chunk: GenerationChunk) -> None:
        output = self.outputs[chunk.index]
        output.add(chunk, self._weight_version)
        self._sink.push(chunk)
        if chunk.finish_reason is not None:
            self._ended(self, output)

    def end(self) -> None:
        self._sink.end()

    @property
    def unfinished(self) -> list[Output]:
        return [output for output in self.outputs if not output.meta]

    def prompt_of(self, output: Output) -> dict[str, Any]:
        """Its text, input_ids or the size of its input_embeds, and what was asked for."""
        prompt = output.index // self.req.num_samples
        texts, ids, embeds = self.req.prompts, self.req.input_ids, self.req.input_embeds
        given: dict[str, Any] = {"input_ids": ids[prompt] if ids else []}
        if texts is not None:
            given = {"text": texts[prompt]}
        elif self.req.pairs is not None:
            given = {"text": list(self.req.pairs[prompt])}
        elif embeds is not None:
            given = {"input_embeds": f"{embeds[prompt].length} x {embeds[prompt].width}"}
        return {
            **given,
            "sampling_params": _given(self.req.sampling_params[prompt]),
            "stream": self.req.stream,
            **_given(self.req.options[prompt]),
        }


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """Its fields that differ from their defaults."""
    fields = msgspec.structs.fields(struct)
    values = {field.name: getattr(struct, field.name) for field in fields}
    defaults = {f.name: f.default_factory() if f.default_factory is not msgspec.NODEFAULT else f.default for f in fields}
    return {name: value for name, value in values.items() if value != defaults[name]}
