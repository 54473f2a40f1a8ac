"""Sequences that have not ended, and the way a BatchStrOut takes to the sinks that wait for them.

A LiveCall is one request: its sink, and how many of its sequences have not ended. A sequence stays in the table until its
terminal message came, also when nobody waits for it any more: only then is its rid free again.

asyncio only; no sockets, no tokenizing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from jaxserve.data_parallel import Replica, Ticket
from jaxserve.messages import BatchStrOut
from jaxserve.server.requests import GenerationChunk, TokenPart
from jaxserve.server.sessions import Turn
from jaxserve.server.sinks import ChunkMerger, ChunkSink
from jaxserve.server.timelines import meta_of
from jaxserve.server.token_logprobs import logprobs_of_tokens
from jaxserve.server.tracing import CallTrace
from jaxserve.timeline import RequestTimeline, RequestTimes
from jaxserve.types import FinishReason


@dataclasses.dataclass(slots=True)
class CallFacts:
    """Of one request, for whoever observes."""

    received_s: float  # Unix time
    sent_s: float = 0.0  # to the scheduler
    num_samples: int = 1
    is_stream: bool = False
    is_observed: bool = True  # the server's own probes are not
    trace: CallTrace | None = None
    is_constrained: bool = False
    as_arrays: bool = False  # its chunks bring `parts`
    labels: tuple[str, ...] = ()  # values of the custom labels of metrics


class LiveCall:
    """One request: where its chunks go."""

    __slots__ = ("_sink", "_unfinished", "facts")

    def __init__(self, sink: ChunkSink, num_sequences: int, facts: CallFacts) -> None:
        self.facts = facts
        self._sink = sink
        self._unfinished = num_sequences  # sequences whose last chunk has not arrived

    def push(self, chunk: GenerationChunk) -> None:
        self._sink.push(chunk)
        if chunk.finish_reason is None:
            return
        self._unfinished -= 1
        if not self._unfinished:
            self._sink.end()


class GapBuffer:
    """Seconds between tokens, and how many times each came."""

    __slots__ = ("seconds", "times")

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.times: list[int] = []

    def add(self, seconds: float, times: int) -> None:
        self.seconds.append(seconds)
        self.times.append(times)


@dataclasses.dataclass(slots=True)
class LiveSequence:
    rid: str
    index: int  # in its request
    facts: CallFacts
    call: LiveCall | None  # None: nobody waits any more, the terminal message is still to come
    is_named: bool = False  # its rid is its client's choice
    ticket: Ticket | None = None  # of the replica that it was sent to
    aborted: bool = False  # before it was sent
    turn: Turn | None = None  # of a session
    first_text_s: float = 0.0  # Unix time of its first chunk
    completion_tokens: int = 0  # so far
    gaps: GapBuffer | None = None  # where the seconds between its tokens go, if somebody counts them
    last_token_s: float = 0.0  # time.perf_counter()

    @property
    def is_sent(self) -> bool:
        """A scheduler knows it."""
        return self.ticket is not None

    @property
    def rank(self) -> int | None:
        """Of the replica that has it."""
        return None if self.ticket is None else self.ticket.replica.rank

    def timeline(self) -> RequestTimeline:
        facts = self.facts
        return RequestTimeline(
            rid=self.rid,
            received_s=facts.received_s,
            sent_s=facts.sent_s,
            dp_rank=self.rank,
            first_text_s=self.first_text_s,
            num_samples=facts.num_samples,
            is_stream=facts.is_stream,
            is_constrained=facts.is_constrained,
            labels=facts.labels,
            completion_tokens=self.completion_tokens,
        )


class LiveTable:
    def __init__(
        self,
        observe: Callable[[RequestTimeline], None] = lambda timeline: None,
        give_back: Callable[[Ticket, int], None] = lambda ticket, num_outputs: None,
        free_rid: Callable[[str], None] = lambda rid: None,
    ) -> None:
        """`observe` is given the time line of each sequence that has ended, `give_back` its ticket and how long it became,
        `free_rid` the rid of each that its client named."""
        self._observe = observe
        self._give_back = give_back
        self._free_rid = free_rid
        self._live: dict[str, LiveSequence] = {}
        self._held: dict[LiveCall, ChunkMerger] = {}  # chunks that wait for `release`

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, rid: str) -> bool:
        return rid in self._live

    def add(self, sequence: LiveSequence) -> None:
        assert sequence.rid not in self._live, f"rid {sequence.rid!r} is already live"
        self._live[sequence.rid] = sequence

    def remove(self, sequence: LiveSequence) -> None:
        """Of a sequence that the scheduler never heard of."""
        if self.holds(sequence):
            del self._live[sequence.rid]
            if sequence.is_named:
                self._free_rid(sequence.rid)
        if sequence.turn is not None:
            sequence.turn.discard()

    def by_rank(self, rids: Iterable[str]) -> dict[int, list[str]]:
        """Of these sequences those that replicas have."""
        ranks: dict[int, list[str]] = {}
        for rid in rids:
            if (sequence := self._live.get(rid)) is not None and sequence.rank is not None:
                ranks.setdefault(sequence.rank, []).append(rid)
        return ranks

    def holds(self, sequence: LiveSequence) -> bool:
        return self._live.get(sequence.rid) is sequence

    def ages(self) -> list[tuple[str, float]]:
        """Of the sequences that somebody waits for, the oldest first, in seconds."""
        now_s = time.time()
        waiting = [(s.rid, now_s - s.facts.received_s) for s in self._live.values() if s.call is not None]
        return sorted(waiting, key=lambda one: -one[1])

    def timelines(self) -> list[RequestTimeline]:
        """Of those that have not ended, the oldest first."""
        return [sequence.timeline() for sequence in self._live.values() if sequence.facts.is_observed]

    def unsent(self, rid_prefix: str) -> list[LiveSequence]:
        return [s for rid, s in self._live.items() if not s.is_sent and rid.startswith(rid_prefix)]

    def route(self, out: BatchStrOut, *, hold: bool = False) -> None:
        """Gives every row to the call that waits for it. The hot path: once per token and sequence.

        `hold`: until `release`, since more of the same is about to follow.
        """
        live, finished, all_logprobs, version = self._live, out.finished, out.logprobs, out.weight_version
        has_more = bool(out.input_logprobs or out.hidden_states or out.experts or out.pooled)
        token_ids, now_s, tick_s = out.token_ids.tolist(), time.time(), time.perf_counter()
        rows = zip(
            out.rids, out.texts, out.token_counts.tolist(), out.prompt_tokens.tolist(), out.completion_tokens.tolist(),
            out.cached_tokens.tolist(), strict=True,
        )  # fmt: skip
        run_gaps: GapBuffer | None = None
        run_since_s, run_count, run_len = 0.0, 1, 0
        end = 0
        for i, (rid, text, count, prompt, completion, cached) in enumerate(rows):
            start, end = end, end + count
            reason = finished.get(i)
            sequence = live.get(rid) if reason is None else live.pop(rid, None)
            if sequence is None:
                continue
            if count:
                if not sequence.completion_tokens:
                    sequence.first_text_s = now_s
                    if sequence.ticket is not None:
                        sequence.ticket.first_token()
                elif (gaps := sequence.gaps) is not None:
                    # Rows whose last tokens came together are next to each other, mostly: one entry for all of them.
                    if gaps is run_gaps and count == run_count and sequence.last_token_s == run_since_s:
                        run_len += 1
                    else:
                        if run_gaps is not None:
                            run_gaps.add((tick_s - run_since_s) / run_count, run_len * run_count)
                        run_gaps, run_since_s, run_count, run_len = gaps, sequence.last_token_s, count, 1
                sequence.completion_tokens, sequence.last_token_s = completion, tick_s
            meta: dict[str, Any] = {}
            if reason is not None:
                timeline = sequence.timeline()
                timeline.prompt_tokens, timeline.cached_tokens = prompt, cached
                meta = self._end(sequence, timeline, out.times.get(i), reason)
            if sequence.turn is not None:
                sequence.turn.take_in(token_ids[start:end], reason)
            if sequence.call is None:
                continue  # its client left
            call, as_arrays = sequence.call, sequence.facts.as_arrays
            ids = [] if as_arrays else token_ids[start:end]
            logprobs = list(logprobs_of_tokens(ids, all_logprobs[i])) if i in all_logprobs and not as_arrays else []
            chunk = GenerationChunk(sequence.index, rid, text, ids, logprobs, prompt, completion, cached, reason, meta, version)
            if as_arrays:
                chunk.parts = [TokenPart(out.token_ids[start:end], all_logprobs.get(i), version)]
            if has_more:
                chunk.hidden_states = [out.hidden_states[i]] if i in out.hidden_states else []
                chunk.experts = [out.experts[i]] if i in out.experts else []
                chunk.input_logprobs = out.input_logprobs.get(i)
                chunk.pooled = out.pooled.get(i)
            if hold:
                self._hold(call, chunk)
            else:
                call.push(chunk)
        if run_gaps is not None:
            run_gaps.add((tick_s - run_since_s) / run_count, run_len * run_count)

    def _end(
        self, sequence: LiveSequence, timeline: RequestTimeline, times: RequestTimes | None, reason: FinishReason
    ) -> dict[str, Any]:
        """Completes its time line. Returns what its reply says of it."""
        if sequence.is_named:
            self._free_rid(sequence.rid)
        if sequence.ticket is not None:
            self._give_back(sequence.ticket, sequence.completion_tokens)
        timeline.answered_s, timeline.scheduler = time.time(), times
        timeline.finish, timeline.status_code = reason.type, reason.status_code
        if sequence.facts.is_observed:
            self._observe(timeline)
        if sequence.facts.trace is not None:
            sequence.facts.trace.ended(sequence.index, timeline)
        return meta_of(timeline)

    def _hold(self, call: LiveCall, chunk: GenerationChunk) -> None:
        merger = self._held.get(call)
        if merger is None:
            merger = self._held[call] = ChunkMerger()
        merger.add(chunk)

    def release(self) -> None:
        """Passes on what is held, one chunk per sequence."""
        held, self._held = self._held, {}
        for call, merger in held.items():
            for chunk in merger.take():
                call.push(chunk)

    def end(self, sequence: LiveSequence, reason: FinishReason, prompt_tokens: int = 0) -> None:
        """Ends a sequence from this side, without the scheduler."""
        self.release()  # what is held comes before the end
        self._live.pop(sequence.rid, None)
        timeline = sequence.timeline()
        timeline.prompt_tokens = prompt_tokens
        meta = self._end(sequence, timeline, None, reason)
        if sequence.turn is not None:
            sequence.turn.take_in([], reason)
        if sequence.call is not None:
            sequence.call.push(GenerationChunk(sequence.index, sequence.rid, "", [], [], prompt_tokens, 0, 0, reason, meta))

    def end_all(self, reason: FinishReason) -> None:
        for sequence in list(self._live.values()):
            self.end(sequence, reason)

    def end_replica(self, replica: Replica, reason: FinishReason) -> None:
        """Of what it had nothing will come any more."""
        for sequence in list(self._live.values()):
            if sequence.ticket is not None and sequence.ticket.replica is replica:
                self.end(sequence, reason)
