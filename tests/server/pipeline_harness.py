"""A pipeline over real processes, or over threads, and what tests ask of it: a FakeRunner behind the real scheduler, the real
detokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import fake_scheduler
import psutil
import pytest

from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.handover import Handover
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, PromptOptions, RequestError
from jaxserve.server.threads import between_threads, thread_commands
from jaxserve.types import SamplingParams


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Pipeline]:
    """A ready pipeline; at the end nothing of it may be left."""
    args = ServerArgs(**{"model_path": demo_model_path(), **options})
    async with _running(Pipeline(args, fake_scheduler.commands(args.dp_size, args.detokenizer_worker_num))) as pipeline:
        yield pipeline


@contextlib.asynccontextmanager
async def running_on_threads(**options: Any) -> AsyncIterator[Pipeline]:
    """The same with threads of this process as workers."""
    before = set(threading.enumerate())
    args = ServerArgs(**{"model_path": demo_model_path(), **options})
    commands = thread_commands(args, [None] * args.dp_size, Handover(), schedule=fake_scheduler.work)
    async with _running(Pipeline(args, commands, open_channels=between_threads)) as pipeline:
        yield pipeline
    # One that hung needs a while.
    await until(lambda: not ({thread for thread in threading.enumerate() if thread.name.startswith("jaxserve")} - before))


@contextlib.asynccontextmanager
async def _running(pipeline: Pipeline) -> AsyncIterator[Pipeline]:
    try:
        await pipeline.start()
        await asyncio.wait_for(pipeline.wait_ready(), 120)
        yield pipeline
    finally:
        pids = pipeline.workers.pids()
        folder = pipeline._channels.folder if pipeline._channels else None
        await pipeline.close()
        assert not [name for name, pid in pids.items() if pid != os.getpid() and psutil.pid_exists(pid)], "a worker is left"
        assert folder is None or not folder.exists()


def request(prompt: str | list[int] = "Hello there", n: int = 1, **fields: Any) -> GenerateReqInput:
    req_fields = {name: fields.pop(name) for name in ("stream", "rids") if name in fields}
    options = PromptOptions(**{name: fields.pop(name) for name in PromptOptions.__struct_fields__ if name in fields})
    params = SamplingParams(**{"max_new_tokens": 8, "n": n, **fields})
    text = isinstance(prompt, str)
    return GenerateReqInput(
        prompts=[prompt] if isinstance(prompt, str) else None,
        input_ids=None if text else [prompt],  # type: ignore[list-item]
        sampling_params=[params],
        options=[options],
        **req_fields,
    )


async def collect(pipeline: Pipeline, req: GenerateReqInput) -> dict[int, list[GenerationChunk]]:
    chunks: dict[int, list[GenerationChunk]] = {}
    async for chunk in pipeline.manager.generate(req):
        chunks.setdefault(chunk.index, []).append(chunk)
    return chunks


async def internal_state(pipeline: Pipeline) -> dict[str, Any]:
    (reply,) = await pipeline.manager.control(GetInternalStateReq())
    return reply.internal_state


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.01)


async def refused(pipeline: Pipeline, req: GenerateReqInput) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await collect(pipeline, req)
    return caught.value
