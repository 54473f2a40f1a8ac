"""Generation without sockets: what is sent for a request, and what the scheduler is told when the text side gives up."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from jaxserve.config import ServerArgs
from jaxserve.data_parallel import DataParallelController, make_policy
from jaxserve.messages import AbortReq, BatchStrOut, BatchTokenizedGenerateReqInput, Route, TokenizedGenerateReqInput
from jaxserve.runner import NO_TOKEN_ID
from jaxserve.server.generation import SEQUENCES_PER_PART, Generation
from jaxserve.server.journal.journal import Journal
from jaxserve.server.output_routes import Routes
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, PromptEmbeds, PromptOptions, RequestError
from jaxserve.server.sinks import ChunkSink, pulled
from jaxserve.server.text_lanes import TextLanes
from jaxserve.types import FinishReason, SamplingParams

LIMITS = ModelLimits(
    context_len=100, vocab_size=50, hidden_size=2, max_total_tokens=1000, max_top_logprobs=5, allow_auto_truncate=False
)


class Flow:
    def __init__(self, routes: Routes | None = None) -> None:
        self.sent: list[Any] = []
        self.limits = LIMITS
        controller = DataParallelController(make_policy("auto", 1), 1)
        controller.set_up(0)
        self.generation = Generation(controller, self._send, TextLanes(), Journal(ServerArgs(), str), routes=routes)

    def _send(self, rank: int, message: Any) -> None:
        assert rank == 0
        self.sent.append(message)

    async def start(self, prompts: list[list[int]] | list[PromptEmbeds], **fields: Any) -> asyncio.Task[list[GenerationChunk]]:
        rids = fields.pop("rids", [f"p{i}" for i in range(len(prompts))])
        options = fields.pop("options", [])
        params = SamplingParams(**{"max_new_tokens": 5, **fields})
        given: dict[str, Any] = {"input_embeds" if isinstance(prompts[0], PromptEmbeds) else "input_ids": prompts}
        req = GenerateReqInput(**given, sampling_params=[params] * len(prompts), rids=rids, options=options)

        def open_stream(req: GenerateReqInput, sink: ChunkSink) -> AbstractAsyncContextManager[None]:
            return self.generation.stream(req, sink, None, self.limits)  # type: ignore[arg-type]

        async def collect() -> list[GenerationChunk]:
            return [chunk async for chunk in pulled(open_stream, req)]

        task = asyncio.create_task(collect())
        await asyncio.sleep(0)
        return task

    async def until_sent(self, count: int) -> None:
        for _ in range(100):
            if len(self.sent) >= count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{len(self.sent)} messages instead of {count}")

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


async def test_the_sequences_of_a_prompt_have_one_route() -> None:
    flow = Flow(Routes(num_detokenizers=3))
    tasks = [await flow.start([[1], [2], [3], [4]], n=2), await flow.start([[1]], rids=["last"])]
    await flow.until_sent(2)
    batch, last = flow.sent
    assert [[sequence.route.detokenizer for sequence in one.sequences()] for one in batch.batch] == [
        [0] * 2,
        [1] * 2,
        [2] * 2,
        [0] * 2,
    ]
    assert last.route == Route(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_parts_of_a_prompt_have_one_route() -> None:
    flow = Flow(Routes(num_detokenizers=2))
    task = await flow.start([[1]], n=2 * SEQUENCES_PER_PART + 1)
    await flow.until_sent(3)
    assert [message.route for message in flow.sent] == [Route(0)] * 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def embeddings() -> PromptEmbeds:
    return PromptEmbeds(np.array([[1, 2], [3, 4], [5, 6]], np.float32), "key")


async def test_embeddings_are_sent_once_and_not_kept() -> None:
    flow, embeds = Flow(), embeddings()
    task = await flow.start([embeds], n=2)
    (message,) = flow.sent
    assert message.input_ids.tolist() == [NO_TOKEN_ID] * 3
    assert message.input_embeds.tolist() == [[1, 2], [3, 4], [5, 6]]
    first, second = message.sequences()
    assert first.input_embeds is second.input_embeds and embeds.key in first.extra_key
    assert embeds.values is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_embeddings_of_all_requests_have_a_bound() -> None:
    flow = Flow()
    flow.generation._most_embeds_bytes = 2 * embeddings().nbytes
    tasks = [await flow.start([embeddings()], rids=[rid]) for rid in "ab"]
    for n in (1, SEQUENCES_PER_PART + 1):
        (refused,) = await asyncio.gather(await flow.start([embeddings()], n=n), return_exceptions=True)
        assert isinstance(refused, RequestError) and refused.status_code == 503
        assert "input_embeds of all requests may take 0 MiB, a quarter of this machine's memory" in refused.message
    tasks.append(await flow.start([[1]], rids=["ids"]))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    task = await flow.start([embeddings()], rids=["later"])
    sent = [one.rid for one in flow.sent if isinstance(one, TokenizedGenerateReqInput)]
    assert sent == ["a", "b", "ids", "later"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_single_sequence_is_a_plain_message() -> None:
    flow = Flow()
    task = await flow.start([[1, 2]])
    (message,) = flow.sent
    assert isinstance(message, TokenizedGenerateReqInput)
    assert list(message.sequences()) == [message]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert flow.sent[1:] == [AbortReq(rids=["p0"])]


async def test_what_the_detokenizer_gave_up_is_aborted_in_the_scheduler() -> None:
    flow = Flow()
    task = await flow.start([[1, 2]])
    flow.end(["p0"], FinishReason.abort("The detokenizer failed.", 500, "InternalServerError"), abandoned=["p0"])
    with pytest.raises(RequestError, match=r"The detokenizer failed\.") as caught:
        await task
    assert caught.value.status_code == 500
    assert flow.sent[1:] == [AbortReq(rids=["p0"])], "once, and before a new request can take the id"
    assert flow.generation.num_live == 0


async def test_a_batch_is_sent_and_aborted_in_parts_with_room_for_others_between() -> None:
    """The loop is free between two parts, an abort names a whole part, and what waits in the scheduler goes first."""
    flow = Flow()
    turns: list[int] = []

    async def count_turns() -> None:
        while True:
            turns.append(len(flow.sent))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    num_parts = 10
    task = await flow.start([[1]] * (SEQUENCES_PER_PART * num_parts))
    await flow.until_sent(num_parts)
    assert set(range(num_parts)) <= set(turns), "others had a turn after each part"
    sent = [[one.rid for one in message.batch] for message in flow.sent]
    assert {len(part) for part in sent} == {SEQUENCES_PER_PART}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    counting.cancel()
    assert flow.sent[num_parts:] == [AbortReq(rids=part) for part in reversed(sent)]
    for part in sent:
        flow.end(part, FinishReason.abort("The request was aborted."))
    assert flow.generation.num_live == 0


async def test_a_client_that_leaves_between_two_parts() -> None:
    flow = Flow()
    task = await flow.start([[1]] * (SEQUENCES_PER_PART * 4))
    await flow.until_sent(2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    sent, aborted = flow.sent[:2], flow.sent[2:]
    assert [abort.rids for abort in aborted] == [[one.rid for one in part.batch] for part in reversed(sent)]
    assert flow.generation.num_live == 2 * SEQUENCES_PER_PART, "those that were sent have their end before them"


async def test_many_samples_are_parts_too() -> None:
    flow = Flow()
    await flow.start([[1, 2]], n=SEQUENCES_PER_PART + 3)
    await flow.until_sent(2)
    sizes = [len(list(message.sequences())) for message in flow.sent]
    assert sizes == [SEQUENCES_PER_PART, 3]
    rids = [sequence.rid for message in flow.sent for sequence in message.sequences()]
    assert rids == [f"p0_{i}" for i in range(SEQUENCES_PER_PART + 3)]


async def test_every_prompt_and_sample_is_sent_with_its_adapter() -> None:
    flow = Flow()
    flow.limits = dataclasses.replace(LIMITS, serves_lora=True)
    options = [PromptOptions(lora_path=name) for name in ("sql", None, "")]
    task = await flow.start([[1], [2], [3]], n=2, options=options)
    (batch,) = flow.sent
    named = [sequence.lora_name for message in batch.batch for sequence in message.sequences()]
    assert named == ["sql", "sql", None, None, None, None]
    assert {message.extra_key for message in batch.batch} == {None}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
