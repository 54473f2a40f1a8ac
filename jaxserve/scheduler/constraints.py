"""Constraints: what grammars and logit processors let the rows of a step sample, and where each request stands in its grammar.

The masks of a step follow from the tokens that its constrained rows got in all steps before it. So a step with such rows is
launched in two phases: its forward pass first, and its sampling when the results of the last step that names one of them are in
and the matchers have followed them.

A row that thinks needs no masks, and nobody waits for it. When its answer begins, the step after that was sampled already,
without a mask: what it gave the row is dropped, and the row is sent back (`jumps`) to be sampled again at that place.
"""

from __future__ import annotations

import numpy as np

from jaxserve.grammar import MaskFiller, Matcher, ThinkingMatcher
from jaxserve.runner import RunnerSpec, StepInput
from jaxserve.scheduler.jumps import Jumps
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.rows import RowFlag, RowTable
from jaxserve.types import FinishReason, ForwardMode

MASKED = RowFlag.GRAMMAR | RowFlag.RULES | RowFlag.PROCESSOR  # rows of which the host decides what they may sample
_REFUSED = "A token was sampled that the grammar does not allow; other parameters, such as stop_token_ids, leave nothing else."


class Constraints:
    def __init__(self, table: RowTable, spec: RunnerSpec, jumps: Jumps) -> None:
        self._table = table
        self._spec = spec
        self._jumps = jumps
        self.due: StepInput | None = None  # the step launched last, if it is not sampled yet and will be asked for with `masks`
        self._filler: MaskFiller | None = None  # made when the first grammar comes: it brings threads

    @property
    def wait_for_results(self) -> bool:
        """Whether the masks that are due depend on steps in flight: their rows are in an earlier one, too."""
        if self.due is None:
            return False
        table, rows = self._table, self.due.rows[self.due.sample]
        return bool((((table.flags[rows] & MASKED) != 0) & (table.in_flight[rows] > 1) & table.alive[rows]).any())

    def masks(self, step: StepInput) -> np.ndarray | None:
        """int32 [R, K, words] for Runner.sample; None if all rows are free for now. Does not `wait_for_results`."""
        table, spec = self._table, self._spec
        flags = np.where(step.sample & table.alive[step.rows], table.flags[step.rows], 0)
        places = (flags & RowFlag.GRAMMAR).nonzero()[0].tolist()
        rows = step.rows[places].tolist()
        matchers = [matcher for row in rows if (matcher := table.req(row).matcher) is not None]
        drafts = [known_drafts(table, step, row) for row in rows]
        ruled = (flags & RowFlag.RULES).nonzero()[0].tolist()
        if not ruled and all(matcher.is_free_along(tokens) for matcher, tokens in zip(matchers, drafts, strict=True)):
            return None
        verifies = step.mode is ForwardMode.DECODE and spec.num_draft_tokens > 1
        masks = np.full((step.num_rows, spec.num_draft_tokens if verifies else 1, spec.mask_words), -1, np.int32)
        if verifies:
            for place, matcher, tokens in zip(places, matchers, drafts, strict=True):
                matcher.fill_masks_along(tokens, masks[place])
        else:
            self._fill(matchers, places, masks[:, 0])
        for place in ruled:
            self._restrict(step, int(step.rows[place]), masks[place])
        return masks

    def _restrict(self, step: StepInput, row: int, masks: np.ndarray) -> None:
        """What the logit processors of a row leave of its masks."""
        rules = self._table.req(row).rules
        assert rules is not None
        drafts = known_drafts(self._table, step, row)
        ids = self._table.known_ids(row)
        if drafts:  # else nothing is copied: the sequence may be long
            ids = np.concatenate([ids, np.array(drafts, np.int32)])
        for count in range(len(drafts) + 1):
            rules.restrict(ids[: len(ids) - len(drafts) + count], masks[count])

    def _fill(self, matchers: list[Matcher | ThinkingMatcher], places: list[int], out: np.ndarray) -> None:
        plain: dict[int, Matcher] = {}
        for place, matcher in zip(places, matchers, strict=True):
            if isinstance(matcher, ThinkingMatcher):
                matcher.fill_mask(out[place])
            else:
                plain[place] = matcher
        if self._filler is None:
            self._filler = MaskFiller()
        self._filler.fill(list(plain.values()), plain, out)

    def follow(self, req: Req, token_id: int) -> FinishReason | None:
        """Takes in a request's newest token. The reason to end it, if the grammar gives one."""
        if req.rules is not None:
            self._table.masks_from[req.row] = req.rules.free_len(self._table.known_ids(req.row))
        matcher = req.matcher
        if matcher is None:
            return None
        if not matcher.accept(token_id):
            if isinstance(matcher, ThinkingMatcher) and not req.returns_states and not req.sampling.stop_regex:
                self._take_back(req)
                return None
            return self.failure(req) or FinishReason.abort(_REFUSED, 400, "BadRequestError")
        req.matcher = matcher.current
        if self._table.thinks_ahead and not req.returns_states and isinstance(matcher, ThinkingMatcher):
            self._note_thinking(req)
        return FinishReason.stop(None) if req.matcher.is_terminated else None

    def _take_back(self, req: Req) -> None:
        """The newest token ends the thinking and begins the answer wrongly, which no mask could know. It is sampled again."""
        table, row = self._table, req.row
        table.known_len[row] -= 1
        if req.logprobs is not None:
            req.logprobs.drop_last()
        table.flags[row] = table.flags[row] & ~np.uint16(RowFlag.THINKING) | np.uint16(RowFlag.GRAMMAR)
        self._jumps.redo(req)

    def _note_thinking(self, req: Req) -> None:
        assert req.matcher is not None
        table, row = self._table, req.row
        thinks, thought = req.matcher.is_free_along(()), bool(table.flags[row] & RowFlag.THINKING)
        if thinks == thought:
            return
        table.flags[row] ^= np.uint16(RowFlag.THINKING | RowFlag.GRAMMAR)
        # Drafts behind the tag, and those that the next step verifies, were guessed and taken without the grammar.
        is_due = self.due is not None and bool((self.due.rows == row).any())
        is_ahead = self._spec.num_draft_tokens > 1 or int(table.in_flight[row]) > is_due
        if thought and is_ahead:
            self._jumps.redo(req)

    @staticmethod
    def failure(req: Req) -> FinishReason | None:
        """Why a request ends whose grammar grew too complex: its mask allows eos alone, but the output is not whole."""
        error = None if req.matcher is None else req.matcher.error
        return None if error is None else FinishReason.abort(error, 400, "BadRequestError")


def known_drafts(table: RowTable, step: StepInput, row: int) -> list[int]:
    """Those that the step verifies: the first of them that is not a token is behind the last."""
    if step.mode is not ForwardMode.DECODE:
        return []
    drafts = table.drafts[row]
    known: list[int] = drafts[: int(np.argmin(np.append(drafts, -1) >= 0))].tolist()
    return known
