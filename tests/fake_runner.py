"""FakeRunner: a Runner without a model, for tests of everything above the executor.

It keeps the device's tables in NumPy: a page table fed by page updates and, in place of KV, the token that each page slot was
written with. A row's next token is a hash of the row's whole token history *read through its pages*, so any mistake with
pages, prefixes, retraction or step order changes the tokens; `expected_tokens` says what they should be. KV groups with a
window must hold the same tokens as far as it reaches; if all have one, the widest is what a token depends on. Steps run in
launch order in a worker thread, really after they were launched: an input array written to meanwhile shows up as a wrong
token too.

An embedding is taken for the token that its first number says.

Its weights are a number, which the hash takes in (`fake_contents`). KV that other weights wrote must not be read, unless
`reads_old_kv`. The same holds of LoRA adapters (`fake_adapters`), row by row.

Vectors of texts: `fake_vectors`.

It also checks each StepInput against the contract in `runner`; a violation is raised by `fetch`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from fake_adapters import FakeAdapters, adapter_number
from fake_answers import expected_experts, expected_hidden, expected_logprobs, expected_scores, mixed
from fake_contents import FakeContents
from fake_shards import numbered_through
from fake_states import FakeRow, FakeStates
from fake_step_checks import check_step
from fake_vectors import FakeVectors, expected_vectors

from jaxserve.commands import AdapterCommand, BesideSteps, Command, ReleaseMemory
from jaxserve.runner import (
    BROKEN_LOGITS,
    NO_CANDIDATES,
    NO_TOKEN_ID,
    KVGroup,
    LogitLines,
    RowState,
    RunnerSpec,
    Scores,
    StepInput,
    StepOutput,
)
from jaxserve.types import ForwardMode

_UNWRITTEN = -2
_UNSEEN = -3


def fake_spec(**changes: Any) -> RunnerSpec:
    """A small RunnerSpec; token 0 is eos. `num_pages` is that of one KV group that keeps all tokens."""
    values: dict[str, Any] = {
        "page_size": 1,
        "kv_groups": (KVGroup(changes.pop("num_pages", 512)),),
        "max_rows": 16,
        "context_len": 256,
        "max_step_tokens": 128,
        "vocab_size": 101,
        "hidden_size": 2,
        "eos_token_ids": (0,),
        "max_top_logprobs": 4,
    }
    return RunnerSpec(**(values | changes))


@dataclasses.dataclass
class _Launched:
    step: StepInput
    output: concurrent.futures.Future[StepOutput] | None = None  # once it is sampled


class FakeRunner:
    def __init__(self, spec: RunnerSpec, *, step_delay_s: float = 0.0, nan_token: int | None = None) -> None:
        """Each step takes at least `step_delay_s`. A row whose history holds `nan_token` gives NaN logits."""
        self._spec = spec
        self._step_delay_s = step_delay_s
        self._nan_token = nan_token
        self._powers = _position_factors(spec.context_len)
        groups = spec.kv_groups
        self._reach = [group.window or spec.context_len for group in groups]  # tokens that a query sees
        self._pages = [np.full((spec.num_shards * group.num_pages, spec.page_size), _UNWRITTEN, np.int32) for group in groups]
        self._written_by = [np.zeros_like(pages, np.int64) for pages in self._pages]  # which weights
        self._page_tables = np.full((len(groups), spec.max_rows, spec.max_pages_per_row), _UNWRITTEN, np.int32)
        self._row_states = FakeStates(spec.max_rows, spec.max_pages_per_row, spec.page_size, len(groups), spec.num_draft_tokens)
        self._kv_len = np.zeros(spec.max_rows, np.int32)
        # What each row's next decode step brings: the token sampled last, once there is one, and drafts (-1: none).
        self._inputs = np.full((spec.max_rows, spec.num_draft_tokens), _UNWRITTEN, np.int32)
        self._states: dict[int, RowState] = {}
        self._worker = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="fake-device")
        self._unsampled: _Launched | None = None
        self._unfetched: collections.deque[_Launched] = collections.deque()  # oldest first
        self.most_in_flight = spec.num_stages + 1  # one in each stage, and the next
        self.reads_old_kv = False  # somebody wants to keep it
        self.adapters = FakeAdapters(spec)
        self.vectors = FakeVectors(spec, self._expects)
        self.command_delay_s = 0.0
        self.programs_missing = 0
        self.commands: list[Command] = []  # all that were given
        self.spans: list[tuple[str, dict[str, Any]]] = []  # all that were annotated
        self._contents = FakeContents(self.spans)
        self._command: concurrent.futures.Future[None] | None = None  # the last that changes something
        self.steps: list[StepInput] = []  # everything launched
        self.masks: list[np.ndarray | None] = []  # of each
        self.changed: list[LogitLines | None] = []

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, step: StepInput) -> _Launched:
        assert self._unsampled is None, "a step is launched before the one before it was sampled"
        assert self._command is None or self._command.done(), "a step is launched while a command is carried out"
        released = self._contents.released
        assert not released, f"a step is launched while {released} is released"
        self.steps.append(step)
        self._unsampled = _Launched(step)
        self._unfetched.append(self._unsampled)
        assert len(self._unfetched) <= self.most_in_flight, (
            f"{len(self._unfetched)} steps are in flight, of {self._spec.num_stages} stages"
        )
        return self._unsampled

    def read_logits(self, handle: _Launched, lines: np.ndarray) -> np.ndarray:
        """Zeros: the hash is no logits. Lines that are changed decide instead of it."""
        assert self._spec.moves_logits, "this runner cannot move logits"
        assert handle is self._unsampled, "logits are read before the step is sampled"
        assert lines.dtype == np.int32 and len(np.unique(lines)) == len(lines)
        return np.zeros((len(lines), self._spec.vocab_size), np.float32)

    def sample(self, handle: _Launched, masks: np.ndarray | None = None, changed: LogitLines | None = None) -> None:
        assert handle is self._unsampled, "only the step launched last may be sampled, once"
        self._unsampled = None
        assert handle.step.needs_masks or (masks is None and changed is None), f"needs_masks={handle.step.needs_masks}"
        self.masks.append(masks)
        self.changed.append(changed)
        handle.output = self._worker.submit(self._run, handle.step, masks, changed)

    def fetch(self, handle: _Launched) -> StepOutput:
        assert handle.output is not None, "a step is fetched that was not sampled"
        assert handle is self._unfetched.popleft(), "steps are fetched out of order"
        return handle.output.result(timeout=60)

    def execute(self, command: Command) -> concurrent.futures.Future[None]:
        self.commands.append(command)
        if isinstance(command, AdapterCommand):
            return self.adapters.execute(command)
        future = self._worker.submit(self._carry_out, command)
        if not isinstance(command, BesideSteps):
            assert not self._unfetched, "a command that changes something is given while a step is in flight"
            self._command = future
        return future

    @contextlib.contextmanager
    def annotate(self, name: str, **facts: Any) -> Iterator[None]:
        self.spans.append((name, facts))
        yield

    def tend(self) -> int:
        return self.programs_missing

    def internal_state(self) -> dict[str, Any]:
        return {"kind": "fake", "num_steps": len(self.steps)}

    def close(self) -> None:
        self._worker.shutdown()
        self.adapters.close()

    def expected_tokens(
        self,
        prompt_ids: list[int],
        count: int,
        *,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (0,),
        weights: int = 0,
        adapter: str | None = None,
    ) -> list[int]:
        """The first `count` tokens this prompt must be answered with, cut after the first of `stop_ids`. Pass the request's
        seed unless it is greedy, and the folder of its adapter."""
        seed += 0 if adapter is None else adapter_number(adapter)
        history, out = list(prompt_ids), []
        for _ in range(count):
            token = self._next_token(np.array(history, np.int32), seed + weights)
            out.append(token)
            history.append(token)
            if token in stop_ids:
                break
        return out

    def expected_vectors(self, prompt_ids: list[int], *, weights: int = 0, adapter: str | None = None) -> list[list[float]]:
        """What a text must be answered with."""
        assert self._spec.vectors is not None
        seed = weights + (0 if adapter is None else adapter_number(adapter))
        return expected_vectors(prompt_ids, self._spec.vectors, lambda ids: self._next_token(np.array(ids, np.int32), seed))

    # --- in the worker thread

    def _carry_out(self, command: Command) -> None:
        time.sleep(self.command_delay_s)
        self._contents.carry_out(command)
        if isinstance(command, ReleaseMemory) and "kv_cache" in command.tags:
            for pages in self._pages:
                pages.fill(_UNWRITTEN)

    def _run(self, step: StepInput, masks: np.ndarray | None, changed: LogitLines | None) -> StepOutput:
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        check_step(step, self._spec)
        step = with_embedded_tokens(step)
        updates = numbered_through(step.page_updates, self._spec)
        self._row_states.enter(updates)
        of_pages = updates.groups < len(self._page_tables)
        self._page_tables[updates.groups[of_pages], updates.rows[of_pages], updates.index[of_pages]] = updates.pages[of_pages]
        self.adapters.enter(step)
        for state in step.new_rows:
            self._begin_row(state, step)
        inputs = [self._inputs_of(step, i) for i in range(step.num_rows)]
        self._write_tokens(step, inputs)
        if self._spec.num_snapshots:
            self._run_states(step, inputs)
        answers = self._answers(step, inputs)
        most = self._spec.num_draft_tokens if step.mode is ForwardMode.DECODE else 1
        tokens = np.full((step.num_rows, most), _UNWRITTEN, np.int32)
        num_tokens = np.zeros(step.num_rows, np.int32)
        preferred = _preferred(changed)
        for i, row in enumerate(step.rows.tolist()):
            if not step.sample[i]:
                self._kv_len[row] += len(inputs[i])
                self._inputs[row] = _UNWRITTEN
            elif len(inputs[i]):
                of_row = {place: preferred.get(i * most + place) for place in range(most)}
                gained = self._gain(row, inputs[i], i < step.num_decode_rows, None if masks is None else masks[i], of_row)
                tokens[i, : len(gained)], num_tokens[i] = gained, len(gained)
        output = self._output(step, tokens, num_tokens)
        if not self._spec.generates:
            assert not step.sample.any(), "a model that generates no text is to sample"
            output = StepOutput(np.zeros_like(tokens), num_tokens)
        return dataclasses.replace(output, **answers)

    def _answers(self, step: StepInput, inputs: list[np.ndarray]) -> dict[str, Any]:
        """To what is asked about the step's tokens: from what stands in their slots, and where."""
        decode_slots = self._spec.num_draft_tokens if step.mode is ForwardMode.DECODE else 1
        slots: list[tuple[int, int]] = []  # position and token
        for i, (row, ids) in enumerate(zip(step.rows.tolist(), inputs, strict=True)):
            most = decode_slots if i < step.num_decode_rows else len(ids)
            tokens = [*ids.tolist(), *[0] * (most - len(ids))]
            slots += [(int(self._kv_len[row]) + place, token) for place, token in enumerate(tokens)]
        scores: Scores | None = None
        hidden = experts = None
        if (query := step.score_query) is not None:
            asked = [slots[slot] for slot in query.slots.tolist()]
            scores = expected_scores(asked, query, self._spec)
        if step.hidden_slots is not None:
            hidden = np.array([expected_hidden(*slots[slot]) for slot in step.hidden_slots.tolist()], np.float32)
        if step.expert_slots is not None:
            experts = np.array([expected_experts(*slots[slot]) for slot in step.expert_slots.tolist()], np.int32)
        pooled = self.vectors.run(step, slots, self._states)
        return {"scores": scores, "hidden_states": hidden, "experts": experts, "pooled": pooled}

    def _begin_row(self, state: RowState, step: StepInput) -> None:
        at = step.rows.tolist().index(state.row)
        assert at >= step.num_decode_rows, f"row {state.row} begins with a decode step"
        start = int(step.seq_lens[at] - step.extend_lens[at])
        assert start % self._spec.page_size == 0, f"row {state.row} begins at {start}, inside a page"
        self._states[state.row] = state
        self._kv_len[state.row] = start
        assert (state.token_ids[state.prompt_len :] == state.output_ids).all(), f"row {state.row} resumes with other outputs"
        ids = _extend_ids(step, at)
        said = state.token_ids[start : start + len(ids)]
        assert ((said == ids) | (said == NO_TOKEN_ID)).all(), f"row {state.row} has other tokens than it says"
        if len(state.output_ids):
            cached = self._history(state.row, start, query=start)
            said = state.token_ids[:start]
            is_other = (said != cached) & (cached != _UNSEEN) & (said != NO_TOKEN_ID)
            assert not is_other.any(), f"row {state.row} found a prefix of other tokens"

    def _inputs_of(self, step: StepInput, at: int) -> np.ndarray:
        """The tokens that the step really adds to its row number `at`."""
        row, end = int(step.rows[at]), int(step.seq_lens[at])
        bound = end - int(step.extend_lens[at])
        start = int(self._kv_len[row])
        if at >= step.num_decode_rows:
            assert start == bound, f"row {row} continues at {bound} but holds {start} tokens"
            ids = _extend_ids(step, at)
            assert start % self._spec.page_size == 0, f"row {row} extends from {start}, inside a page"
            zero_tokens = self._states[row].sampling.max_new_tokens == 0
            whole = end % self._spec.page_size == 0
            assert step.sample[at] or whole or zero_tokens, f"chunk of row {row} ends at {end}"
            return ids
        assert self._inputs[row, 0] != _UNWRITTEN, f"decode row {row} has no token from its step before"
        drafts = self._spec.num_draft_tokens > 1
        assert start <= bound if drafts else start == bound, f"row {row} continues at {bound} but holds {start} tokens"
        inputs = self._inputs[row, : 1 if step.mode is not ForwardMode.DECODE else None]
        return inputs[: int(np.argmin(np.append(inputs, -1) >= 0))][: end - bound].copy()

    def _write_tokens(self, step: StepInput, inputs: list[np.ndarray]) -> None:
        """All rows write before any row reads, as on the device."""
        slots: list[np.ndarray] = []
        page_size = self._spec.page_size
        for row, bound, ids in zip(step.rows.tolist(), step.seq_lens.tolist(), inputs, strict=True):
            start = int(self._kv_len[row])
            held = self._page_tables[:, row, np.arange(start, bound) // page_size]
            assert (held >= 0).all(), f"row {row} may write tokens {start}..{bound} without pages"
            positions = np.arange(start, start + len(ids))
            pages = self._page_tables[:, row, positions // page_size]
            for tokens, writers, at in zip(self._pages, self._written_by, pages, strict=True):
                tokens[at, positions % page_size] = ids
                writers[at, positions % page_size] = self._contents.weights + self.adapters.writer(row)
            slots.append(pages * page_size + positions % page_size)
        for written in np.concatenate(slots, axis=1):
            assert len(np.unique(written)) == len(written), "two rows of one step write to the same slot"

    def _run_states(self, step: StepInput, inputs: list[np.ndarray]) -> None:
        rows = [(row, int(self._kv_len[row]), len(ids)) for row, ids in zip(step.rows.tolist(), inputs, strict=True)]
        histories = [self._history(row, start + count).tolist() for row, start, count in rows]
        self._row_states.run(
            [FakeRow(row, start, of_row) for (row, start, _), of_row in zip(rows, histories, strict=True)],
            self._contents.weights,
            in_turn=step.mode is ForwardMode.DECODE,
        )

    def _gain(
        self, row: int, inputs: np.ndarray, is_decode: bool, masks: np.ndarray | None, preferred: dict[int, int | None]
    ) -> list[int]:
        """What the row samples, up to the first draft that is wrong; the row is ready for its next step then."""
        start, gained = int(self._kv_len[row]), []
        ends = range(1, len(inputs) + 1) if is_decode else [len(inputs)]
        for place, count in enumerate(ends):
            token = self._sample(row, start + count, None if masks is None else masks[place], preferred.get(place))
            gained.append(token)
            if count == len(inputs) or token != inputs[count]:
                break
        self._kv_len[row] = start + (len(gained) if is_decode else len(inputs))
        # After NaN logits the device has some token too, and a step that was launched meanwhile runs with it.
        self._inputs[row] = -1
        self._inputs[row, 0] = max(gained[-1], 0)
        self._draft(row)
        return gained

    def _draft(self, row: int) -> None:
        """Some right guesses, then perhaps a wrong one: as many as a hash of the history says."""
        history = np.append(self._history(row, int(self._kv_len[row])), self._inputs[row, 0])
        seed = self._contents.weights + self.adapters.seed(row)
        seed += 0 if self._states[row].sampling.is_greedy else self._states[row].seed
        for place in range(1, self._spec.num_draft_tokens):
            luck = mixed(int(history.astype(np.int64).sum()) + 7919 * place) % 8
            if luck == 0 or len(history) >= self._spec.context_len:
                return
            token = self._next_token(history, seed)
            self._inputs[row, place] = token if luck > 2 else (token + luck) % self._spec.vocab_size
            history = np.append(history, self._inputs[row, place])

    def _history(self, row: int, length: int, query: int | None = None) -> np.ndarray:
        """The first `length` tokens as the token at `query` (default: the last of them) sees them; _UNSEEN before that."""
        query = length - 1 if query is None else query
        num_pages = -(-length // self._spec.page_size)
        history = np.full(length, _UNSEEN, np.int32)
        for group, reach in enumerate(self._reach):
            start, pages = max(query - reach + 1, 0), self._page_tables[group, row, :num_pages]
            seen = self._pages[group][pages].reshape(-1)[start:length]
            assert (seen != _UNWRITTEN).all(), f"row {row} reads slots that were never written"
            written_by = self._written_by[group][pages].reshape(-1)[start:length]
            own = self._contents.weights + self.adapters.writer(row)
            assert self.reads_old_kv or (written_by == own).all(), f"row {row} reads what other weights wrote"
            known = history[start:] != _UNSEEN
            assert (seen == history[start:])[known].all(), f"row {row} reads other tokens in group {group} than in those before"
            history[start:] = seen
        return history

    def _sample(self, row: int, seq_len: int, mask: np.ndarray | None, preferred: int | None) -> int:
        history, state = self._history(row, seq_len), self._states[row]
        if self._nan_token is not None and self._nan_token in history:
            return BROKEN_LOGITS
        seed = self._contents.weights + self.adapters.seed(row) + (0 if state.sampling.is_greedy else state.seed)
        token = self._next_token(history, seed) if preferred is None else preferred
        return self._first_allowed(token, mask)

    def _expects(self, row: int, length: int) -> int | None:
        history = self._history(row, length)
        if self._nan_token is not None and self._nan_token in history:
            return None
        return self._next_token(history, self._contents.weights + self.adapters.seed(row))

    def _next_token(self, history: np.ndarray, seed: int) -> int:
        start = max(len(history) - max(self._reach), 0)
        seen = history[start:].astype(np.uint64) + np.uint64(1)
        total = int((self._powers[start : len(history)] * seen).sum(dtype=np.uint64))
        return mixed(total + seed * 0x9E3779B97F4A7C15) % self._spec.vocab_size

    def _first_allowed(self, token: int, mask: np.ndarray | None) -> int:
        """From this one on."""
        if mask is None:
            return token
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._spec.vocab_size]
        if not allowed.any():
            return NO_CANDIDATES
        return (token + int(np.roll(allowed, -token).argmax())) % self._spec.vocab_size

    def _output(self, step: StepInput, tokens: np.ndarray, num_tokens: np.ndarray) -> StepOutput:
        logprobs = expected_logprobs(tokens, self._spec.vocab_size)
        rank = np.arange(self._spec.max_top_logprobs, dtype=np.int32)
        top_ids = ((tokens[..., None] + rank) % self._spec.vocab_size).astype(np.int32)
        has_top = step.needs_top_logprobs
        return StepOutput(
            tokens,
            num_tokens,
            logprobs if step.needs_logprobs else None,
            top_ids if has_top else None,
            logprobs[..., None] - rank.astype(np.float32) if has_top else None,
            self._inputs[step.rows, 1:].copy() if self._spec.num_draft_tokens > 1 else None,
        )


def _preferred(changed: LogitLines | None) -> dict[int, int]:
    """The likeliest token of each line that was really changed."""
    if changed is None:
        return {}
    return {
        line: int(logits.argmax()) for line, logits in zip(changed.lines.tolist(), changed.logits, strict=True) if logits.any()
    }


def with_embedded_tokens(step: StepInput) -> StepInput:
    """With the tokens that its embeddings stand for."""
    ids, previous_end = step.input_ids.copy(), step.num_decode_rows
    for embeds in step.embeds:
        first = embeds.first_slot - step.num_decode_rows
        end = first + len(embeds.values)
        assert previous_end <= embeds.first_slot and end <= len(ids), "embeddings out of order, or behind the step"
        assert (ids[first:end] == NO_TOKEN_ID).all(), "a token has an id and an embedding"
        ids[first:end] = embeds.values[:, 0]
        previous_end = embeds.first_slot + len(embeds.values)
    assert (ids >= 0).all(), "a token has neither an id nor an embedding"
    return dataclasses.replace(step, input_ids=ids)


def _extend_ids(step: StepInput, at: int) -> np.ndarray:
    """The input tokens of the step's row number `at`, an extend row."""
    start = int(step.extend_lens[step.num_decode_rows : at].sum())
    return step.input_ids[start : start + int(step.extend_lens[at])]


def _position_factors(count: int) -> np.ndarray:
    """Odd 64-bit numbers, one per position."""
    return np.random.default_rng(7).integers(1 << 63, size=count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
