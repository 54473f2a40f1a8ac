"""Constraints: what grammars let the rows of a step sample, and where each request stands in its grammar.

The masks of a step follow from the tokens of all steps before it. So a step with constrained rows is launched in two phases:
its forward pass first, and its sampling when the results of the step before are in and the matchers have followed them.
"""

from __future__ import annotations

import numpy as np

from jaxserve.grammar import MaskFiller
from jaxserve.runner import RunnerSpec, StepInput
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.rows import RowFlag, RowTable
from jaxserve.types import FinishReason, ForwardMode

_REFUSED = "A token was sampled that the grammar does not allow; other parameters, such as stop_token_ids, leave nothing else."


class Constraints:
    def __init__(self, table: RowTable, spec: RunnerSpec) -> None:
        self._table = table
        self._spec = spec
        self._filler: MaskFiller | None = None  # made when the first grammar comes: it brings threads

    def masks(self, step: StepInput) -> np.ndarray:
        """int32 [R, K, words] for Runner.sample. All results of earlier steps must have been processed."""
        table, spec = self._table, self._spec
        if self._filler is None:
            self._filler = MaskFiller()
        verifies = step.mode is ForwardMode.DECODE and spec.num_draft_tokens > 1
        masks = np.full((step.num_rows, spec.num_draft_tokens if verifies else 1, spec.mask_words), -1, np.int32)
        is_constrained = (table.flags[step.rows] & RowFlag.GRAMMAR) != 0
        places = (step.sample & table.alive[step.rows] & is_constrained).nonzero()[0].tolist()
        rows = step.rows[places].tolist()
        matchers = [matcher for row in rows if (matcher := table.req(row).matcher) is not None]
        if not verifies:
            self._filler.fill(matchers, places, masks[:, 0])
            return masks
        for place, row, matcher in zip(places, rows, matchers, strict=True):
            drafts = table.drafts[row]
            matcher.fill_masks_along(drafts[: int(np.argmin(np.append(drafts, -1) >= 0))].tolist(), masks[place])
        return masks

    @staticmethod
    def follow(req: Req, token_id: int) -> FinishReason | None:
        """Takes in a request's newest token. The reason to end it, if the grammar gives one."""
        matcher = req.matcher
        if matcher is None:
            return None
        if not matcher.accept(token_id):
            return Constraints.failure(req) or FinishReason.abort(_REFUSED, 400, "BadRequestError")
        return FinishReason.stop(None) if matcher.is_terminated else None

    @staticmethod
    def failure(req: Req) -> FinishReason | None:
        """Why a request ends whose grammar grew too complex: its mask allows eos alone, but the output is not whole."""
        error = None if req.matcher is None else req.matcher.error
        return None if error is None else FinishReason.abort(error, 400, "BadRequestError")
