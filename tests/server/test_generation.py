"""Generation without sockets: what is sent for a request, and what the scheduler is told when the text side gives up."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from jaxserve.messages import AbortReq, BatchStrOut, BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from jaxserve.server.generation import Generation
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, RequestError
from jaxserve.server.sinks import ChunkSink, pulled
from jaxserve.types import FinishReason, SamplingParams

LIMITS = ModelLimits(context_len=100, vocab_size=50, max_total_tokens=1000, max_top_logprobs=5, allow_auto_truncate=False)


class Flow:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.generation = Generation(self.sent.append, log_requests=False)

    async def start(self, prompts: list[list[int]], **fields: Any) -> asyncio.Task[list[GenerationChunk]]:
        params = SamplingParams(**{"max_new_tokens": 5, **fields})
        rids = [f"p{i}" for i in range(len(prompts))]
        req = GenerateReqInput(input_ids=prompts, sampling_params=[params] * len(prompts), rids=rids)

        def open_stream(req: GenerateReqInput, sink: ChunkSink) -> AbstractAsyncContextManager[None]:
            return self.generation.stream(req, sink, None, LIMITS)  # type: ignore[arg-type]

        async def collect() -> list[GenerationChunk]:
            return [chunk async for chunk in pulled(open_stream, req)]

        task = asyncio.create_task(collect())
        await asyncio.sleep(0)
        return task

    def end(self, rids: list[str], reason: FinishReason, **fields: Any) -> None:
        zeros = np.zeros(len(rids), np.int32)
        self.generation.receive(
            BatchStrOut(
                rids=rids, texts=[""] * len(rids), token_ids=np.zeros(0, np.int32), token_counts=zeros, prompt_tokens=zeros,
                completion_tokens=zeros, cached_tokens=zeros, finished=dict.fromkeys(range(len(rids)), reason), **fields,
            )
        )  # fmt: skip


async def test_one_entry_per_prompt_whatever_n_is() -> None:
    flow = Flow()
    task = await flow.start([[1, 2], [3]], n=3, sampling_seed=2**63 - 1)
    (batch,) = flow.sent
    assert isinstance(batch, BatchTokenizedGenerateReqInput)
    assert [one.input_ids.tolist() for one in batch.batch] == [[1, 2], [3]]
    sequences = [sequence for one in batch.batch for sequence in one.sequences()]
    assert [sequence.rid for sequence in sequences] == ["p0_0", "p0_1", "p0_2", "p1_0", "p1_1", "p1_2"]
    seeds = [sequence.sampling_params.sampling_seed for sequence in sequences]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1] * 2, "seeds count on, around the end of 64 bits"
    assert all(sequence.sampling_params.n == 1 and not sequence.more_samples for sequence in sequences)
    flow.end([sequence.rid for sequence in sequences], FinishReason.length_limit(0))
    assert len(await task) == 6
    assert flow.generation.num_live == 0


async def test_a_single_sequence_is_a_plain_message() -> None:
    flow = Flow()
    task = await flow.start([[1, 2]])
    (message,) = flow.sent
    assert isinstance(message, TokenizedGenerateReqInput)
    assert list(message.sequences()) == [message]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert flow.sent[1:] == [AbortReq(rid="p0")]


async def test_what_the_detokenizer_gave_up_is_aborted_in_the_scheduler() -> None:
    flow = Flow()
    task = await flow.start([[1, 2]])
    flow.end(["p0"], FinishReason.abort("The detokenizer failed.", 500, "InternalServerError"), abandoned=["p0"])
    with pytest.raises(RequestError, match=r"The detokenizer failed\.") as caught:
        await task
    assert caught.value.status_code == 500
    assert flow.sent[1:] == [AbortReq(rid="p0")], "once, and before a new request can take the id"
    assert flow.generation.num_live == 0
