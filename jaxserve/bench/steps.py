"""The runner, driven as the scheduler drives it: the next step is launched before the last one is fetched.

Neither a scheduler nor a tokenizer is in the times. Rows keep their pages; what stands in them does not matter to the time a
step takes.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.runner import KVGroup, PageUpdates, RowState, Runner, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

_NOTHING = np.zeros(0, np.int32)
_NO_UPDATES = PageUpdates.of(_NOTHING, _NOTHING, _NOTHING)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a row's prompt in a step."""

    row: int
    start: int
    end: int
    prompt_len: int


def prefill_steps(prompt_lens: Sequence[int], max_step_tokens: int, page_size: int) -> list[list[Chunk]]:
    """Row by row, every step as full as it may be; a chunk ends where its prompt or a page ends."""
    steps: list[list[Chunk]] = [[]]
    room = max_step_tokens
    for row, length in enumerate(prompt_lens):
        start = 0
        while start < length:
            end = min(start + room // page_size * page_size, length) if length - start > room else length
            if end == start:
                steps.append([])
                room = max_step_tokens
                continue
            steps[-1].append(Chunk(row, start, end, length))
            room -= end - start
            start = end
    return steps


class StepDriver:
    """Times prompts and decode steps of some rows of a runner, which must not draft; they are dealt to its shards in turn."""

    def __init__(self, runner: Runner) -> None:
        assert runner.spec.num_draft_tokens == 1, "a driven runner knows how long its rows are"
        self._runner, self._spec = runner, runner.spec

    def check(self, num_rows: int, row_tokens: int) -> None:
        """ValueError, with a sentence, if there is no room for the first rows with so many tokens each."""
        spec = self._spec
        if num_rows > spec.max_rows:
            raise ValueError(f"{num_rows} rows are more than --max-running-requests, which is {spec.max_rows}.")
        if row_tokens > spec.context_len:
            raise ValueError(f"{row_tokens} tokens are more than the context length, which is {spec.context_len}.")
        for group in spec.kv_groups:
            needed = -(-num_rows // spec.num_shards) * self._pages_of_row(group, row_tokens)
            if needed > group.num_pages:
                size = spec.num_shards * spec.page_size
                raise ValueError(
                    f"{num_rows} rows of {row_tokens} tokens need {needed * size} tokens of KV cache, and there are "
                    f"{group.num_pages * size} (--max-total-tokens, --mem-fraction-static)."
                )

    def enter(self, num_rows: int, row_tokens: int) -> None:
        """Gives each of so many rows the pages of so many tokens, by a step of one token."""
        self.check(num_rows, row_tokens)
        index = np.arange(-(-row_tokens // self._spec.page_size), dtype=np.int32)
        for row in range(num_rows):
            of_groups = [self._updates(row, index, group) for group in range(len(self._spec.kv_groups))]
            joined = PageUpdates(*(np.concatenate(parts) for parts in zip(*of_groups, strict=True)))
            self._runner.fetch(self._extend([Chunk(row, 0, 1, 1)], joined))

    def prefill(self, prompt_lens: Sequence[int]) -> float:
        """Seconds from the first launch until the last token of the last prompt is known."""
        started_s, in_flight = time.perf_counter(), collections.deque[Any]()
        for chunks in prefill_steps(prompt_lens, self._spec.max_step_tokens, self._spec.page_size):
            in_flight.append(self._extend(chunks))
            if len(in_flight) > self._spec.num_stages:
                self._runner.fetch(in_flight.popleft())
        for handle in in_flight:
            self._runner.fetch(handle)
        return time.perf_counter() - started_s

    def decode(self, context_lens: Sequence[int], num_steps: int) -> list[float]:
        """Seconds of each step, from one result to the next; the first has none before it and nothing to overlap with.
        `context_lens` tokens are cached before it."""
        lengths = np.asarray(context_lens, np.int32)
        times, before_s = [], time.perf_counter()
        last = self._decode(lengths + 1)
        for step in range(1, num_steps + 1):
            handle = self._decode(lengths + 1 + step) if step < num_steps else None
            self._runner.fetch(last)
            now_s = time.perf_counter()
            times.append(now_s - before_s)
            last, before_s = handle, now_s
        return times

    def _pages_of_row(self, group: KVGroup, row_tokens: int) -> int:
        """Where a window is all that is seen, a row's pages take turns."""
        spec = self._spec
        kept = row_tokens if group.window is None else min(row_tokens, group.window + spec.max_step_tokens)
        return min(-(-row_tokens // spec.page_size), -(-kept // spec.page_size) + 1)

    def _updates(self, row: int, index: np.ndarray, group: int) -> tuple[np.ndarray, ...]:
        """The fields of PageUpdates."""
        distinct = self._pages_of_row(self._spec.kv_groups[group], len(index) * self._spec.page_size)
        pages = row // self._spec.num_shards * distinct + index % distinct
        return np.full_like(index, self._request_row(row)), index, pages, np.full_like(index, group)

    def _request_row(self, row: int) -> int:
        """The runner's, of the `row`-th that is used."""
        own, shard = divmod(row, self._spec.num_shards)
        return shard * self._spec.rows_per_shard + own

    def _extend(self, chunks: Sequence[Chunk], updates: PageUpdates = _NO_UPDATES) -> Any:
        step = _step(
            ForwardMode.EXTEND,
            rows=[self._request_row(chunk.row) for chunk in chunks],
            seq_lens=[chunk.end for chunk in chunks],
            extend_lens=[chunk.end - chunk.start for chunk in chunks],
            input_ids=np.concatenate([self._ids(chunk.start, chunk.end) for chunk in chunks]),
            sample=[chunk.end == chunk.prompt_len for chunk in chunks],
            page_updates=updates,
            new_rows=[
                _greedy(self._request_row(chunk.row), self._ids(0, chunk.prompt_len)) for chunk in chunks if chunk.start == 0
            ],
        )
        return launch(self._runner, step)

    def _ids(self, start: int, end: int) -> np.ndarray:
        return (10 + np.arange(start, end, dtype=np.int32)) % self._spec.vocab_size

    def _decode(self, lengths: np.ndarray) -> Any:
        rows, ones = [self._request_row(row) for row in range(len(lengths))], [1] * len(lengths)
        return launch(self._runner, _step(ForwardMode.DECODE, rows, lengths, ones, _NOTHING, [True] * len(ones)))


def _step(
    mode: ForwardMode,
    rows: Sequence[int],
    seq_lens: Any,
    extend_lens: Sequence[int],
    input_ids: np.ndarray,
    sample: Sequence[bool],
    page_updates: PageUpdates = _NO_UPDATES,
    new_rows: Sequence[RowState] = (),
) -> StepInput:
    return StepInput(
        mode=mode,
        rows=np.asarray(rows, np.int32),
        seq_lens=np.asarray(seq_lens, np.int32),
        extend_lens=np.asarray(extend_lens, np.int32),
        num_decode_rows=len(rows) if mode is ForwardMode.DECODE else 0,
        input_ids=input_ids,
        sample=np.asarray(sample, bool),
        page_updates=page_updates,
        new_rows=list(new_rows),
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )


def _greedy(row: int, token_ids: np.ndarray) -> RowState:
    return RowState(
        row,
        SamplingParams(temperature=0),
        seed=0,
        prompt_len=len(token_ids),
        stop_token_ids=_NOTHING,
        output_ids=_NOTHING,
        token_ids=token_ids,
    )
