"""What the rows of a step want to know besides their next token: logprobs of prompts and of tokens they name, hidden states,
experts.

A step answers for the tokens it computes, so a prompt's answers come chunk by chunk; what the prefix cache already has is
computed again as far as somebody asks about it (`Req.recompute_from`). A ScorePlan is the runner's query and, once it is
answered, knows which line is whose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.runner import NO_TOKEN_ID, ScoreQuery, StepOutput
from jaxserve.scheduler.prefill_item import PrefillItem
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.rows import RowFlag, RowTable

ASKING = RowFlag.SCORES | RowFlag.TOKEN_STATES
_NO_IDS = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class _PromptPart:
    """Positions [start, end) of a request's prompt; their lines begin at `line`."""

    req: Req
    start: int
    end: int
    line: int

    @property
    def lines(self) -> range:
        return range(self.line, self.line + self.end - self.start)


@dataclasses.dataclass
class _Lines:
    """Slots of the step that something is asked about, line by line, and whose they are."""

    of_rows: np.ndarray  # int32 [R]: the line of the row's first output; -1: nothing is asked about its outputs
    parts: list[_PromptPart] = dataclasses.field(default_factory=list)
    slots: list[np.ndarray] = dataclasses.field(default_factory=list)
    count: int = 0

    @property
    def all_slots(self) -> np.ndarray | None:
        return np.concatenate(self.slots) if self.count else None

    def answer(self, answers: np.ndarray | None, row: int, place: int) -> np.ndarray | None:
        """Of `answers` [lines, ...] the one about the token behind which the step's row number `row` gained one at `place`;
        None if nothing is asked about that, as where it is the prompt's last."""
        line = int(self.of_rows[row])
        return None if line < 0 or answers is None else answers[line + place]

    def add(self, first_slot: int, count: int = 1) -> int:
        """Returns the first line."""
        self.slots.append(np.arange(first_slot, first_slot + count, dtype=np.int32))
        self.count += count
        return self.count - count

    def add_part(self, item: PrefillItem, first_slot: int, start: int, end: int) -> bool:
        """What of the prompt's positions [start, end) the step computes."""
        start, end = max(start, item.start), min(end, item.end)
        if start < end:
            line = self.add(first_slot + start - item.start, end - start)
            self.parts.append(_PromptPart(item.req, start, end, line))
        return start < end


@dataclasses.dataclass(frozen=True)
class ScorePlan:
    scores: _Lines
    hidden: _Lines
    experts: _Lines
    query: ScoreQuery | None

    def take_in_prompts(self, output: StepOutput) -> None:
        """Answers about prompts go to their requests."""
        for part in self.scores.parts:
            if not part.req.is_finished:
                assert part.req.prompt_logprobs is not None and output.scores is not None
                part.req.prompt_logprobs.take_in(part.start, output.scores, part.lines)
        for part in self.hidden.parts:
            if not part.req.is_finished:
                assert part.req.hidden_states is not None and output.hidden_states is not None
                part.req.hidden_states.take_in_prompt(part.start, output.hidden_states[part.line : part.lines.stop])
        for part in self.experts.parts:
            if not part.req.is_finished:
                assert part.req.experts is not None and output.experts is not None
                part.req.experts.take_in_prompt(part.start, output.experts[part.line : part.lines.stop])

    def id_logprobs(self, output: StepOutput, row: int, place: int) -> np.ndarray | None:
        """float32 [I] for the token that the step's row number `row` gained at `place`."""
        return self.scores.answer(None if output.scores is None else output.scores.id_logprobs, row, place)


def plan_scores(table: RowTable, decode_rows: np.ndarray, items: Sequence[PrefillItem], tokens_per_row: int) -> ScorePlan:
    """Of a step of these rows; decode rows have `tokens_per_row` slots each."""
    num_rows = len(decode_rows) + len(items)
    scores, hidden, experts = (_Lines(np.full(num_rows, -1, np.int32)) for _ in range(3))
    targets: list[np.ndarray] = []
    token_ids: list[np.ndarray] = []  # of each line

    def ask(first_targets: np.ndarray, ids: np.ndarray | None) -> None:
        targets.append(first_targets)
        token_ids.extend([_NO_IDS if ids is None else ids] * len(first_targets))

    unknown = np.full(tokens_per_row, NO_TOKEN_ID, np.int32)
    for at in np.flatnonzero(table.flags[decode_rows] & ASKING).tolist():
        req, slot = table.req(int(decode_rows[at])), at * tokens_per_row
        if req.token_ids_logprob is not None:
            scores.of_rows[at] = scores.add(slot, tokens_per_row)
            ask(unknown, req.token_ids_logprob)
        if req.hidden_states is not None:
            hidden.of_rows[at] = hidden.add(slot, tokens_per_row)
        if req.experts is not None:
            experts.of_rows[at] = experts.add(slot, tokens_per_row)
    slot = len(decode_rows) * tokens_per_row
    for at, item in enumerate(items, len(decode_rows)):
        req, last_slot = item.req, slot + item.end - item.start - 1
        samples = item.is_last and req.max_len > item.fill_len
        if (prompt := req.prompt_logprobs) is not None and scores.add_part(item, slot, prompt.next, prompt.end):
            part = scores.parts[-1]
            ask(req.prompt_ids[part.start + 1 : part.end + 1], req.token_ids_logprob)
        if samples and req.token_ids_logprob is not None:
            scores.of_rows[at] = scores.add(last_slot)
            ask(unknown[:1], req.token_ids_logprob)
        for lines, states in ((hidden, req.hidden_states), (experts, req.experts)):
            if states is not None:
                lines.add_part(item, slot, states.next, states.end)
                if samples and item.fill_len > req.prompt_len:
                    lines.of_rows[at] = lines.add(last_slot)
        slot = last_slot + 1
    query = None
    if scores.count:
        needs_top = any(part.req.prompt_logprobs.top_num for part in scores.parts if part.req.prompt_logprobs)
        query = ScoreQuery(np.concatenate(scores.slots), np.concatenate(targets), _padded(token_ids), needs_top)
    return ScorePlan(scores, hidden, experts, query)


def _padded(token_ids: list[np.ndarray]) -> np.ndarray:
    """int32 [lines, the most tokens of a line]."""
    padded = np.full((len(token_ids), max(map(len, token_ids))), NO_TOKEN_ID, np.int32)
    for line, ids in zip(padded, token_ids, strict=True):
        line[: len(ids)] = ids
    return padded
