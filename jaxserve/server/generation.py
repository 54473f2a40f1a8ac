"""Generation: every request's way from the front door to the scheduler, and its chunks' way back.

    stream(GenerateReqInput, sink) -> check -> tokenize -> TokenizedGenerateReqInput -> scheduler
    sink <- LiveCall <- LiveTable.route <- BatchStrOut <- detokenizer

asyncio only: it is given a function that sends, and told what arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from jaxserve.messages import (
    AbortReq,
    BatchStrOut,
    BatchTokenizedGenerateReqInput,
    Message,
    Sample,
    TokenizedGenerateReqInput,
)
from jaxserve.server.live_requests import LiveCall, LiveSequence, LiveTable
from jaxserve.server.request_checks import (
    ModelLimits,
    cache_namespace,
    check_prompt,
    check_shape,
    fit_new_tokens,
    sample_params,
)
from jaxserve.server.requests import GenerateReqInput, RequestError, new_rid
from jaxserve.server.sinks import ChunkSink
from jaxserve.server.tokenizer import Tokenizer
from jaxserve.types import FinishReason

logger = logging.getLogger(__name__)

# Text up to this length is tokenized on the loop (well under a millisecond); longer text in a thread.
INLINE_TOKENIZE_CHARS = 2000
HEALTH_CHECK_RID = "HEALTH_CHECK"

_ABORTED = FinishReason.abort("The request was aborted.")


class Generation:
    def __init__(self, send: Callable[[Message], None], *, log_requests: bool) -> None:
        """`send` reaches the scheduler; what it is given arrives in that order."""
        self._send = send
        self._log_requests = log_requests
        self._live = LiveTable()

    @property
    def num_live(self) -> int:
        """Sequences whose terminal message has not come."""
        return len(self._live)

    @contextlib.asynccontextmanager
    async def stream(
        self, req: GenerateReqInput, sink: ChunkSink, tokenizer: Tokenizer, limits: ModelLimits
    ) -> AsyncIterator[None]:
        """Sends the request; its chunks go to the sink. Entering raises RequestError for bad input; leaving aborts what still
        runs."""
        check_shape(req, limits)
        call = LiveCall(
            sink, req.num_sequences, return_logprob=req.return_logprob, received_s=time.time(), log_end=self._log_requests
        )
        sequences = self._register(req, call)
        try:
            prompts = req.input_ids if req.input_ids is not None else await _encode(tokenizer, req.prompts or [])
            self._send_request(req, sequences, [check_prompt(ids, limits) for ids in prompts], limits)
            yield
        finally:
            self._leave(sequences)

    def receive(self, out: BatchStrOut, *, hold: bool = False) -> None:
        """`hold`: its chunks wait for `release`."""
        self._live.route(out, hold=hold)
        for rid in out.abandoned:
            self._send(AbortReq(rid=rid))

    def release(self) -> None:
        self._live.release()

    def abort_unsent(self, rid_prefix: str) -> None:
        """Of the requests whose rid starts so, those that the scheduler has not heard of end when they are tokenized."""
        for sequence in self._live.unsent(rid_prefix):
            sequence.aborted = True

    def end_all(self, reason: FinishReason) -> None:
        """From this side: nobody will send their last chunks any more."""
        self._live.end_all(reason)

    def _register(self, req: GenerateReqInput, call: LiveCall) -> list[LiveSequence]:
        """Takes the rids, before anything is awaited: from here on a second request of one of them is refused."""
        bases = req.rids if req.rids is not None else [_draw_rid(req) for _ in range(req.num_prompts)]
        n = req.num_samples
        rids = [base if n == 1 else f"{base}_{j}" for base in bases for j in range(n)]
        taken = next((rid for rid in rids if rid in self._live), None)
        if taken is not None:
            raise RequestError(f"Duplicate request ID: rid {taken!r} belongs to a request that is still running.", param="rid")
        if len(set(rids)) < len(rids):
            twice = next(rid for rid, count in Counter(rids).items() if count > 1)
            raise RequestError(f"Duplicate request ID: the rids of a request must differ, {twice!r} comes twice.", param="rid")
        sequences = [LiveSequence(rid, index, call) for index, rid in enumerate(rids)]
        for sequence in sequences:
            self._live.add(sequence)
        return sequences

    def _send_request(
        self,
        req: GenerateReqInput,
        sequences: list[LiveSequence],
        prompts: list[np.ndarray],
        limits: ModelLimits,
    ) -> None:
        """One message, with one entry per prompt."""
        rooms = [fit_new_tokens(p, len(ids), limits) for p, ids in zip(req.sampling_params, prompts, strict=True)]
        if self._log_requests:
            rids, lens = [s.rid for s in sequences], [len(ids) for ids in prompts]
            logger.info("Request %s: prompts of %s tokens, %s", rids, lens, req.sampling_params[0])
        n = req.num_samples
        batch = []
        for prompt, (ids, room) in enumerate(zip(prompts, rooms, strict=True)):
            wanted = self._wanted(sequences[prompt * n : (prompt + 1) * n], len(ids))
            if wanted:
                batch.append(_to_scheduler_form(req, prompt, wanted, ids, room))
        if len(batch) == 1:
            self._send(batch[0])
        elif batch:
            self._send(BatchTokenizedGenerateReqInput(batch=batch))

    def _wanted(self, sequences: list[LiveSequence], prompt_len: int) -> list[LiveSequence]:
        """Those that nobody aborted while their prompt was tokenized; they count as sent now."""
        wanted = []
        for sequence in sequences:
            if sequence.aborted:
                self._live.end(sequence, _ABORTED, prompt_len)
            elif self._live.holds(sequence):  # else everything failed meanwhile
                sequence.sent = True
                wanted.append(sequence)
        return wanted

    def _leave(self, sequences: Sequence[LiveSequence]) -> None:
        """The call is over: what it has not seen the end of is aborted, at once and by exact rid."""
        for sequence in sequences:
            sequence.call = None
            if not sequence.sent:
                self._live.remove(sequence)
            elif self._live.holds(sequence):
                self._send(AbortReq(rid=sequence.rid))


def _to_scheduler_form(
    req: GenerateReqInput, prompt: int, sequences: list[LiveSequence], ids: np.ndarray, room: int
) -> TokenizedGenerateReqInput:
    n = req.num_samples
    first, *others = [sample_params(req.sampling_params[prompt], s.index % n, room) for s in sequences]
    return TokenizedGenerateReqInput(
        rid=sequences[0].rid,
        input_ids=ids,
        sampling_params=first,
        stream=req.stream,
        return_logprob=req.return_logprob,
        top_logprobs_num=req.top_logprobs_num if req.return_logprob else 0,
        priority=req.priority,
        extra_key=cache_namespace(req.extra_key, req.cache_salt),
        more_samples=[
            Sample(sequence.rid, params.sampling_seed) for sequence, params in zip(sequences[1:], others, strict=True)
        ],
    )


async def _encode(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    if sum(map(len, prompts)) <= INLINE_TOKENIZE_CHARS:
        return tokenizer.encode_batch(prompts)
    return await asyncio.to_thread(tokenizer.encode_batch, prompts)


def _draw_rid(req: GenerateReqInput) -> str:
    return f"{HEALTH_CHECK_RID}_{new_rid()}" if req.is_health_check else new_rid()
